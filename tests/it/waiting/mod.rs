//! How callers wait: deadlines, turns, and outages that are never taken for contention.

mod deadlines;
mod outages;
mod turns;
