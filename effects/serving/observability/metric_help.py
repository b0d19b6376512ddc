"""A description of each metric: the HELP lines of /metrics.

A sample is one of the `n` answers to a prompt; a sequence is a sample in the engine.
Times are as the server measures them.
"""

from collections.abc import Mapping
from typing import Final

HELP: Final[Mapping[str, str]] = {
    # As things are now.
    "num_requests_running": "Samples that are being computed now.",
    "num_requests_waiting": "Samples in the waiting queue now.",
    "num_requests_waiting_by_reason": (
        "Samples in the waiting queue now, by what they wait for: blocks (the KV cache "
        "is full), rows (the batch is full), budget (a step takes no more tokens), turn "
        "(they are behind the head of the queue), share (their client uses its share "
        "of rows while others run), loading (their KV blocks are on their way from host "
        "memory, a disk or another engine), adapter (theirs is not on the device), "
        "replica (none of several takes them now), policy, sibling, step, fault."
    ),
    "kv_cache_usage_perc": (
        "Share of the KV cache that running samples hold, from 0 to 1; what is only kept "
        "for prefixes that may come again counts as free."
    ),
    "num_adapters_running": "Adapters (LoRA) of samples that are being computed now.",
    "num_adapters_waiting": (
        "Adapters (LoRA) of requests that wait now, of which no request runs."
    ),
    "spec_decode_mean_acceptance_length": (
        "Tokens that a sample had of a step with guesses, on average since the start: "
        "those that were right, and one more; 0 before there were any."
    ),
    "journal_writing": "1 while the journal is written, 0 while it cannot be.",
    # Counts since the start.
    "request_success": (
        "Samples that have ended, by why: stop (by the model, or a stop string), length "
        "(by max_tokens, or the context), abort (cancelled, or the client left), error."
    ),
    "request_wait_seconds": (
        "Seconds that requests waited in the queue before they ran first, by what they "
        "waited for; causes as in minfer_num_requests_waiting_by_reason."
    ),
    "prompt_tokens": "Tokens of admitted prompts, cached ones included.",
    "generation_tokens": "Tokens that were written, over all samples.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": (
        "Prompt tokens that were found in the prefix cache, and not computed again."
    ),
    "num_preemptions": (
        "How often a running sample was preempted: its KV blocks went to another one, "
        "and are recomputed; if this grows, the KV cache is too small for the load."
    ),
    "kv_host_loaded_blocks": (
        "KV blocks whose loading from host memory has begun, for a waiting sample."
    ),
    "kv_host_recomputed_blocks": (
        "KV blocks in host memory that a waiting sample computes, as that is faster."
    ),
    "kv_host_lost_blocks": "KV blocks whose copy to or from host memory failed.",
    "kv_keyed_loaded_blocks": (
        "KV blocks whose loading from disk, or from what another engine has sent, has "
        "begun, for a waiting sample."
    ),
    "kv_keyed_recomputed_blocks": (
        "KV blocks on disk, or sent by another engine, that a waiting sample computes, "
        "as that is faster."
    ),
    "kv_keyed_lost_blocks": (
        "KV blocks that could not be copied to or from a disk or another engine: they "
        "are not kept there, or are computed."
    ),
    "kv_sent_blocks": "KV blocks that were sent to another engine.",
    "kv_sent_bytes": "Bytes of the KV blocks that were sent to another engine.",
    "kv_send_seconds": "Seconds in which KV blocks were being sent to another engine.",
    "kv_unsent_blocks": (
        "KV blocks that could not be sent to another engine, which computes them."
    ),
    "kv_received_blocks": "KV blocks that another engine has sent.",
    "kv_received_bytes": "Bytes of the KV blocks that another engine has sent.",
    "kv_receive_seconds": (
        "Seconds in which KV blocks were being copied from what was sent, with the time "
        "that they were waited for."
    ),
    "kv_unread_blocks": (
        "KV blocks that another engine has sent, and that made room for others before a "
        "request wanted them."
    ),
    "kv_disk_stored_blocks": "Files of KV blocks that were written.",
    "kv_disk_stored_bytes": "Bytes of the files of KV blocks that were written.",
    "kv_disk_store_seconds": "Seconds in which KV blocks were being copied to disk.",
    "kv_disk_dropped_blocks": (
        "KV blocks whose copy to disk failed: it is full, or cannot be written."
    ),
    "kv_disk_fetched_blocks": "Files of KV blocks that were read.",
    "kv_disk_fetched_bytes": "Bytes of the files of KV blocks that were read.",
    "kv_disk_fetch_seconds": "Seconds in which KV blocks were being copied from disk.",
    "kv_disk_refused_files": (
        "Files of KV blocks that were not used, so that their blocks are computed, by "
        "cause: missing (removed to make room), torn (a part is missing), corrupted "
        "(changed since it was written), foreign (of another deployment, layout or key), "
        "newer (of a later version), unreadable."
    ),
    "adapter_requests": (
        "Requests that have ended, by the name of their adapter. Those of adapters "
        "beyond the first 64 of an API server are counted together, and adapters with "
        "the same content under one of their names."
    ),
    "adapter_generation_tokens": (
        "Tokens that were written for these requests, by the name of their adapter."
    ),
    "adapter_loads": "How often an adapter was loaded into a slot of the device.",
    "failed_adapter_loads": "Loads of adapters that failed; their requests have ended.",
    "steps_without_graph": (
        "Forwards that were launched kernel by kernel, as no CUDA graph of their shape "
        "was captured yet. Forwards that are too large for a graph are not counted."
    ),
    "steps_without_graph_seconds": "Seconds in which the host launched these.",
    "graphs_captured_in_steps": "CUDA graphs for whose capture a step waited.",
    "graphs_captured_in_steps_seconds": "Seconds in which steps waited for these.",
    "kernels_compiled_in_steps": (
        "Kernels that a step had to compile, as they were not compiled at the start."
    ),
    "kernels_compiled_in_steps_seconds": "Seconds in which steps waited for these.",
    "device_allocations_in_steps": (
        "Times that a step without a graph, or a capture, took memory from the device."
    ),
    "device_bytes_allocated_in_steps": "Bytes that were taken so.",
    "failed_steps": "Steps of the engine that failed; their samples run again, or end.",
    "overruled_policy_answers": (
        "Answers of the scheduling policy that the engine could not follow."
    ),
    "spec_decode_num_drafts": (
        "Steps of a sample in which tokens were guessed ahead for it and verified."
    ),
    "spec_decode_num_draft_tokens": "Tokens that were guessed ahead and verified.",
    "spec_decode_num_accepted_tokens": (
        "Guessed tokens that the model would have written too: each is a step that the "
        "sample did not need."
    ),
    "spec_decode_num_accepted_tokens_per_pos": (
        "The same by place behind the sample's last token, from 0; a guess is right only "
        "if those before it are."
    ),
    "journal_errors": "Times that the journal could not be written.",
    # How values spread, since the start.
    "time_to_first_token_seconds": (
        "Seconds from a sample's arrival to its first token, waiting included."
    ),
    "inter_token_latency_seconds": (
        "Seconds from one output of a sample to its next, as a stream's reader sees it."
    ),
    "iteration_tokens_total": "Tokens that one step of the engine computed.",
    "e2e_request_latency_seconds": "Seconds from a request's arrival to its last token.",
    "request_time_per_output_token_seconds": (
        "Seconds per token of a request after its first, on average."
    ),
    "request_queue_time_seconds": "Seconds that a request waited before it ran first.",
    "request_prefill_time_seconds": (
        "Seconds from when a request ran first to its first token."
    ),
    "request_decode_time_seconds": (
        "Seconds from a request's first token to its last; 0 if it has only one."
    ),
    "request_inference_time_seconds": (
        "Seconds from when a request ran first to its last token."
    ),
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens that a request's samples got, together.",
    "request_params_n": "Samples that a request requested.",
    "request_params_max_tokens": (
        "Tokens that a request could get at most: its max_tokens, or what fitted."
    ),
    "request_preemptions": "How often samples of a request were preempted.",
}
SETTINGS: Final = "How the engine was set up, as labels; the value is always 1."
# Of each replica, where there are several; those above are of all together.
REPLICA_HELP: Final[Mapping[str, str]] = {
    "replica_up": "1 while the replica takes requests, 0 while it is started again.",
    "replica_requests_running": "Samples that the replica computes now.",
    "replica_requests_waiting": "Samples in the waiting queue of the replica now.",
    "replica_kv_cache_usage_perc": (
        "Share of the replica's KV cache that running samples hold, from 0 to 1."
    ),
    "replica_info": (
        "Where the replica is and what it does (both, prefill or decode), as labels; the "
        "value is always 1."
    ),
    "routed": (
        "Requests that were sent to a replica, by why: cost, session, adapter, hash, "
        "load or turn (the routing policy's reasons), resumed (another replica had it, "
        "and died), search (a later round of a beam search)."
    ),
}
