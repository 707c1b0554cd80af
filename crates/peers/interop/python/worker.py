"""Locks of Python libraries for `cargo xtask interop`, used as their documentation shows.

The protocol is that of tools/interop/src/messages.rs: a line with the assignment, and then a line for each order. Each
answer is a line that begins with "@ ".
"""

import json
import logging
import os
import queue
import random
import sys
import threading
import time

import redis
import redis_lock


class RedisPy:
    """redis-py. Without a ttl, the lock stays until it is released."""

    def __init__(self, connection, name, poll):
        self.connection, self.name, self.poll = connection, name, poll
        self.held = None

    def lock(self, ttl):
        lock = self.connection.lock(self.name, timeout=ttl, sleep=self.poll)
        self.held = lock if lock.acquire() else None

    def try_lock(self, ttl):
        lock = self.connection.lock(self.name, timeout=ttl)
        if not lock.acquire(blocking=False):
            return False
        self.held = lock
        return True

    def unlock(self):
        try:
            self.held.release()
        except redis.exceptions.LockError:
            return False
        return True


class PythonRedisLock:
    """python-redis-lock, which counts ttls in whole seconds. Without a ttl, the lock stays until it is released."""

    def __init__(self, connection, name, poll):
        self.connection, self.name = connection, name
        self.held = None

    def new(self, ttl):
        return redis_lock.Lock(self.connection, self.name, expire=None if ttl is None else max(1, round(ttl)))

    def lock(self, ttl):
        self.held = self.new(ttl)
        self.held.acquire()

    def try_lock(self, ttl):
        lock = self.new(ttl)
        if not lock.acquire(blocking=False):
            return False
        self.held = lock
        return True

    def unlock(self):
        try:
            self.held.release()
        except redis_lock.NotAcquired:
            return False
        return True


LIBRARIES = {"redis-py": RedisPy, "python-redis-lock": PythonRedisLock}


class Section:
    """The section that locks must keep to one at a time."""

    def __init__(self, connection, name):
        self.connection = connection
        self.inside, self.total = f"section:{name}:inside", f"section:{name}:total"

    def enter(self, hold):
        """Returns whether somebody else was inside."""
        others = self.connection.incr(self.inside) != 1
        total = int(self.connection.get(self.total) or 0)
        time.sleep(hold)
        self.connection.set(self.total, total + 1)
        self.connection.decr(self.inside)
        return others


def grants(library, section, order):
    hold, pause = order["hold_ms"] / 1000, order["pause_ms"] / 1000
    overlaps, longest = 0, 0.0
    for _ in range(order["count"]):
        asked = time.monotonic()
        if order["locked"]:
            library.lock(order["ttl_ms"] / 1000)
        longest = max(longest, time.monotonic() - asked)
        overlaps += section.enter(hold)
        if order["locked"] and not library.unlock():
            raise RuntimeError("the lock was lost")
        time.sleep(random.random() * pause)
    return {"grants": order["count"], "overlaps": overlaps, "longest_wait_ms": longest * 1000}


def listen(orders):
    for line in sys.stdin:
        orders.put(json.loads(line))
    # The program that gave the orders has ended.
    os._exit(1)


def say(message):
    print("@ " + json.dumps(message), flush=True)


def serve():
    assignment = json.loads(sys.stdin.readline())
    connection = redis.Redis.from_url(assignment["url"])
    name = assignment["name"]
    library = LIBRARIES[assignment["library"]](connection, name, assignment["poll_ms"] / 1000)
    section = Section(connection, name)
    orders = queue.Queue()
    threading.Thread(target=listen, args=(orders,), daemon=True).start()
    connection.ping()
    say({"Ok": {}})
    while True:
        order = orders.get()
        kind = order["do"]
        ttl = order.get("ttl_ms")
        ttl = None if ttl is None else ttl / 1000
        if kind == "grants":
            report = grants(library, section, order)
        elif kind == "lock":
            library.lock(ttl)
            report = {"done": True}
        elif kind == "try_lock":
            report = {"done": library.try_lock(ttl)}
        elif kind == "unlock":
            report = {"done": library.unlock()}
        else:
            raise ValueError(kind)
        say({"Ok": report})


if __name__ == "__main__":
    # python-redis-lock warns of each lock that is taken.
    logging.disable()
    try:
        serve()
    except Exception as error:
        say({"Err": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        os._exit(1)
