//! How callers wait: deadlines, order, and outages that are never reported as contention.

mod deadlines;
mod order;
mod outages;
