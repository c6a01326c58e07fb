// What is on record of a session and of the turns of one path, as JSON.

import { h, put } from "./dom.js";
import { fold, json } from "./pieces.js";

export class Raw {
  constructor(path, session) {
    this.session = h("div");
    this.turns = h("div");
    this.shown = [];
    this.node = h("div.raw", h("h2", "Session"), this.session, h("h2", "Turns of this path"), this.turns);
    this.grow(path, session);
  }

  // What is as it was stays, and stays unfolded.
  grow(path, session) {
    const { notes: _, ...rest } = session;
    put(this.session, json(rest));
    path.forEach((turn, at) => {
      const known = this.shown[at];
      if (known?.turn === turn) return;
      const node = fold(`#${turn.index} ${turn.turn_id}`, () => json(turn), { open: known?.node.open });
      if (known) known.node.replaceWith(node);
      else this.turns.append(node);
      this.shown[at] = { turn, node };
    });
  }
}
