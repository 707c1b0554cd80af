// Locks of two versions of redlock for `cargo xtask interop`, used as their documentation shows.
//
// The protocol is that of tools/interop/src/messages.rs: a line with the assignment, and then a line for each order.
// Each answer is a line that begins with "@ ".
"use strict";

const readline = require("node:readline");
const { setTimeout: sleep } = require("node:timers/promises");
const { default: Redis } = require("ioredis");

const NO_RETRY = { retryCount: 0 };

class Redlock4 {
  constructor(connection, name, poll) {
    const Redlock = require("redlock4");
    this.name = name;
    this.waiting = new Redlock([connection], retries(poll));
    this.once = new Redlock([connection], NO_RETRY);
  }

  async lock(ttl) {
    this.held = await this.waiting.lock(this.name, ttl);
  }

  async tryLock(ttl) {
    this.held = await this.once.lock(this.name, ttl);
  }

  async unlock() {
    await this.held.unlock();
  }
}

class Redlock5 {
  constructor(connection, name, poll) {
    const { default: Redlock } = require("redlock5");
    this.name = name;
    this.waiting = new Redlock([connection], retries(poll));
    this.once = new Redlock([connection], NO_RETRY);
  }

  async lock(ttl) {
    this.held = await this.waiting.acquire([this.name], ttl);
  }

  async tryLock(ttl) {
    this.held = await this.once.acquire([this.name], ttl);
  }

  async unlock() {
    await this.once.release(this.held);
  }
}

function retries(poll) {
  return { retryCount: 1e9, retryDelay: poll, retryJitter: poll / 2 };
}

// Both versions report a lock that is taken, or no longer held, by an error.
async function succeeds(call) {
  try {
    await call;
    return true;
  } catch (error) {
    if (error.name === "LockError" || error.name === "ExecutionError") {
      return false;
    }
    throw error;
  }
}

// The section that locks must keep to one at a time. Returns whether somebody else was inside.
async function enter(connection, name, hold) {
  const inside = `section:${name}:inside`;
  const total = `section:${name}:total`;
  const others = (await connection.incr(inside)) !== 1;
  const before = Number((await connection.get(total)) ?? 0);
  await sleep(hold);
  await connection.set(total, before + 1);
  await connection.decr(inside);
  return others;
}

async function grants(library, connection, name, order) {
  let overlaps = 0;
  let longest = 0;
  for (let grant = 0; grant < order.count; grant++) {
    const asked = performance.now();
    if (order.locked) {
      await library.lock(order.ttl_ms);
    }
    longest = Math.max(longest, performance.now() - asked);
    overlaps += await enter(connection, name, order.hold_ms);
    if (order.locked && !(await succeeds(library.unlock()))) {
      throw new Error("the lock was lost");
    }
    await sleep(Math.random() * order.pause_ms);
  }
  return { grants: order.count, overlaps, longest_wait_ms: longest };
}

async function serve() {
  const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  const assignment = JSON.parse((await lines.next()).value);
  const { name } = assignment;
  const connection = new Redis(assignment.url, { lazyConnect: true });
  await connection.connect();
  const Library = { "redlock-4": Redlock4, "redlock-5": Redlock5 }[assignment.library];
  const library = new Library(connection, name, assignment.poll_ms);
  say({ Ok: {} });
  for await (const line of lines) {
    const order = JSON.parse(line);
    switch (order.do) {
      case "grants":
        say({ Ok: await grants(library, connection, name, order) });
        break;
      case "lock":
        await library.lock(order.ttl_ms);
        say({ Ok: { done: true } });
        break;
      case "try_lock":
        say({ Ok: { done: await succeeds(library.tryLock(order.ttl_ms)) } });
        break;
      case "unlock":
        say({ Ok: { done: await succeeds(library.unlock()) } });
        break;
      default:
        throw new Error(line);
    }
  }
}

function say(message) {
  process.stdout.write(`@ ${JSON.stringify(message)}\n`);
}

process.stdin.on("end", () => process.exit(1));
serve().catch((error) => {
  say({ Err: `${error.name}: ${error.message}` });
  process.exitCode = 1;
  process.stdout.end(() => process.exit(1));
});
