// Entries of the log in plain words.

import { seconds } from "./pauses.js";
import { el, item } from "./dom.js";
import { clock, count, many } from "./format.js";
import { END, PALETTE, came, ended, lives } from "./lives.js";
import { brief, kindOf, log, run, sample, text } from "./run.js";

const STATES = ["waiting", "in prefill", "writing", "waiting again"];
const ENDS = {
  __proto__: null,
  rejected: "is refused",
  error: "ends in an error",
  cancelled: "is cancelled",
  length: "has reached its limit",
};
const LINK = 30; // letters of an id
const TIERS = {
  "load from host": "host memory",
  "fetch from external": "disk or another engine",
};

export function passed(from, to) {
  return clock(seconds[to] - seconds[from]);
}

// The results of drafts.
export function draftsInWords({ proposed, accepted }) {
  return `${count(accepted)} of ${many(proposed, "draft")} accepted`;
}

// A request's name as a button; the side panel knows what to do with `data-sample`.
export function link(s) {
  if (!lives[s]) return "another sequence";
  const name = brief(s, LINK);
  const made = el("button", { className: "link", title: text(sample.id[s]) });
  made.dataset.sample = s;
  made.append(`request ${name}`);
  return made;
}

function and(place) {
  return text(place) ? `: ${text(place)}` : "";
}

// Why the head of the queue is not admitted.
function blocked(i) {
  const available = `${count(log.c[i])} ${log.c[i] === 1 ? "is" : "are"} available`;
  const causes = {
    __proto__: null,
    blocks: `it needs ${many(log.b[i], "block")}, ${available}`,
    rows: `all ${count(run.max_num_seqs)} places in the batch are taken`,
    budget: "the token budget of this step is spent",
    sibling: "another sample of its request is computing the prompt that they share",
    loading: "its cached blocks are on their way to the device",
    adapter: "its adapter is not on the device, and all others wait, too",
    share: "its client has its share of seats, or of newcomers, while others run",
    policy: `the scheduling policy (${run.policy}) defers it`,
  };
  return causes[text(log.a[i])] ?? text(log.a[i]);
}

// An entry of the log as a sentence about `name`.
export function entry(i, name = link(log.sample[i])) {
  const about = { i, name, a: log.a[i], b: log.b[i], c: log.c[i], s: log.sample[i] };
  return (
    eventSentence(about) ??
    adapterSentence(about) ??
    decisionSentence(about) ??
    chunkSentence(about)
  );
}

function eventSentence({ i, name, a, b, s }) {
  switch (kindOf(i)) {
    case "Present":
      return item([name, ` was ${STATES[a]} as this recording begins`]);
    case "Submit": {
      const prompt = many(sample.prompt[s], "prompt token");
      return item([
        name,
        ` arrives: ${prompt}, at most ${count(sample.most[s])} to write`,
      ]);
    }
    case "Cancel": {
      return item([
        s < 0 ? `request ${text(a)}` : name,
        " is not wanted any more: cancel",
      ]);
    }
    case "Finish":
      return item([
        name,
        ` is to end after ${many(a, "token")} (${text(b)}), says the text layer`,
      ]);
    case "Pause":
      return item([name, a ? " awaits the mask of its next token" : " has its mask"]);
    case "Failed":
      return item([`step ${count(a)} failed${and(b)}`], "wrong");
    default:
      return undefined;
  }
}

function adapterSentence({ i, name, a, b, c }) {
  switch (kindOf(i)) {
    case "AdapterLoading":
      return item([name, ` has its adapter loaded into slot ${count(a)}`]);
    case "SlotBlocked": {
      const slots = `${many(b, "slot is", "slots are")} used, ${count(a)} loading`;
      return item([name, ` waits for a slot for its adapter: ${slots}`], "held");
    }
    case "AdapterLost": {
      const ended = many(c, "sample ends", "samples end");
      const words = `the load of an adapter into slot ${count(a)} failed${and(b)}`;
      return item([`${words}; ${ended}`], "wrong");
    }
    case "DropAdapter":
      return item([`the adapter ${text(a)} is unloaded`]);
    default:
      return undefined;
  }
}

function decisionSentence(about) {
  const { i, name, a, b, c, s } = about;
  switch (kindOf(i)) {
    case "Admitted":
      return admitted(about);
    case "Missed": {
      const found = a ? `the first ${count(a)}` : "none";
      return item([name, ` finds ${found} of its ${many(b, "full block")} cached`]);
    }
    case "WindowMissed": {
      const had = `of ${many(c, "cached block")} those before block ${count(b)}`;
      return item([name, ` uses ${had}: it is not in the window of layer group ${a}`]);
    }
    case "StateMissed": {
      const had = `of ${many(b, "cached block")} the first ${count(a)}`;
      return item([name, ` uses ${had}: no state was kept behind the others`]);
    }
    case "Loading": {
      const more = `${many(a - b, "block")} from ${TIERS[text(c)]}`;
      return item([name, ` waits for ${more}: ${count(b)} are on the device`], "hit");
    }
    case "Recomputing": {
      const more = `${many(a - b, "block")} again`;
      return item([name, ` computes ${more}, which ${TIERS[text(c)]} has, too`]);
    }
    case "LostBlocks":
      return item([`${many(a, "block")} could not be copied${and(b)}`], "wrong");
    case "SavesSkipped": {
      const done = `step ${count(a)} saves ${many(b, "state")} of recurrent layers`;
      return item([`${done}, as many as one may; ${count(c)} more were due`]);
    }
    case "QueueBlocked":
      return item([name, ` waits: ${blocked(i)}`], "held");
    case "Preempted":
      return preempted(about);
    case "Finished": {
      const how = ENDS[text(a)] ?? `ends (${text(a)})`;
      const look = PALETTE[s < 0 ? END : ended(s)];
      return item([name, ` ${how} after ${many(b, "token")}${and(c)}`], look);
    }
    case "Discarded": {
      const rows = many(c, "sequence starts", "sequences start");
      const words = `step ${count(a)} failed${and(b)}; ${rows} again`;
      return item([`${words} from what is in memory`], "wrong");
    }
    case "Ignored":
      return item([`a ${text(a)} means nothing here: ${text(b)}`]);
    case "PolicyOverride": {
      const answer = `${text(b)} when asked for ${text(a)}`;
      const words = `the scheduling policy (${run.policy}) ${answer}`;
      return item([`${words}: first come, first served instead`], "wrong");
    }
    default:
      return undefined;
  }
}

function admitted({ i, name, a, b, c, s }) {
  const after = came(s) ? ` ${passed(lives[s].born, log.turn[i])} after it came` : "";
  const found = `${a ? count(a) : "none"} of its ${many(b, "token")}`;
  return item(
    [
      name,
      ` starts to run${after}: ${found} found in the prefix cache`,
      c ? `, ${count(c)} copied from another sample` : "",
    ],
    a ? "hit" : "",
  );
}

function preempted({ name, a, b, c, s }) {
  const why = a === s || a < 0 ? [", as blocks ran out"] : [" for ", link(a)];
  const kept = `, and keeps its ${many(b, "token")}`;
  const lost = `their KV (${many(c, "position")}) leaves memory unless it stays cached`;
  return item([name, " is preempted", ...why, `${kept}; ${lost}`], "again");
}

function chunkSentence({ name, b }) {
  return item(
    [`${many(b, "token")} of `, name, b === 1 ? " is read" : " are read"],
    "fill",
  );
}
