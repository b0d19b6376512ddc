// Drawing once a frame, however often something changes.

let paint = () => {};
export let due = false;

export function paintWith(painter) {
  paint = painter;
}

export function refresh() {
  if (!due) {
    requestAnimationFrame(() => {
      due = false;
      paint();
    });
  }
  due = true;
}
