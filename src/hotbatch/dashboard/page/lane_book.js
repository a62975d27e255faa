// Who sits where: gives every request of the batch a seat for as long as it lives.
//
// A frame names all live requests, so whoever is not in it any more has left, also if the frame
// that said so was missed. The lowest free seat goes to the next one: that is how the picture
// shows the batch refilling itself.

// A request that nobody has sent yet and that is computed ahead has a lane as well, of a class of its
// own, until it is claimed by the one that it guessed, or dropped.

export const FIELDS = 8; // of a lane in a frame: see lane_fields in the hello
export const CELL = 8; // of a cell: seat, class, state, prompt, decode, drafts, accepted, isMine
export const AHEAD_FIELDS = 5; // of a guess: see ahead_fields in the hello
export const AHEAD = 3; // its class, behind those of the hello
const FATES = [0, 0, 3, 4]; // computing, computed, claimed, dropped: as STATES
export const STATES = ["running", "paused", "evicted", "done", "cut", "failed"];
export const RUNNING = 0, PAUSED = 1, EVICTED = 2, DONE = 3;

export class LaneBook {
  constructor() {
    this.clear();
  }

  clear() {
    this.lanes = new Map(); // by number
    this.seats = []; // the lane in each seat, or null
    this.mine = new Set(); // numbers of lanes of this page's playground
  }

  /** Takes in a frame; returns its cells, CELL integers each. */
  take(frame, isMine) {
    for (const [number, id] of frame.named ?? []) if (isMine(id)) this.mine.add(number);
    const flat = [...frame.lanes, ...asLanes(frame.ahead ?? [])];
    const seen = new Set();
    for (let i = 0; i < flat.length; i += FIELDS) seen.add(flat[i]);
    for (const lane of [...this.lanes.values()]) if (!seen.has(lane.number)) this.#leave(lane);

    const cells = new Int32Array(flat.length);
    for (let i = 0; i < flat.length; i += FIELDS) {
      const lane = this.lanes.get(flat[i]) ?? this.#sit(flat[i], flat[i + 1]);
      lane.state = flat[i + 2];
      lane.isReading = flat[i + 3] > 0;
      lane.written += flat[i + 4];
      lane.context = flat[i + 7];
      cells.set([lane.seat, lane.class, lane.state, flat[i + 3], flat[i + 4], flat[i + 5], flat[i + 6],
        this.mine.has(lane.number) ? 1 : 0], (i / FIELDS) * CELL);
    }
    for (const lane of [...this.lanes.values()]) if (lane.state >= DONE) this.#leave(lane);
    return cells;
  }

  #sit(number, serviceClass) {
    let seat = this.seats.indexOf(null);
    if (seat < 0) seat = this.seats.length;
    const lane = { number, class: serviceClass, seat, state: RUNNING, written: 0, context: 0, isReading: true };
    this.seats[seat] = lane;
    this.lanes.set(number, lane);
    return lane;
  }

  #leave(lane) {
    this.seats[lane.seat] = null;
    while (this.seats.length && this.seats.at(-1) === null) this.seats.pop();
    this.lanes.delete(lane.number);
    this.mine.delete(lane.number);
  }
}

/** Guesses as lanes: their numbers are negative, as they are counted apart. */
function asLanes(ahead) {
  const flat = [];
  for (let i = 0; i < ahead.length; i += AHEAD_FIELDS) {
    const [number, state, prompt, written, context] = ahead.slice(i, i + AHEAD_FIELDS);
    flat.push(-1 - number, AHEAD, FATES[state], prompt, written, 0, 0, context);
  }
  return flat;
}
