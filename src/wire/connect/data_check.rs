//! The first request of each connection to a node of a quorum. It checks whether the node's process is new and may have
//! lost data.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use redis::{Pipeline, Value};

use crate::config::key;
use crate::util::clock::MonotonicTime;
use crate::util::id;
use crate::wire::scripts;

/// The check of one node, and the estimate of the node's clock.
pub struct DataCheck {
    mark: String,
    quarantine: Duration,
    /// Whether the user has set that a restarted node keeps its data (`assume_durable_nodes`).
    keeps_data: bool,
    clock: ClockEstimate,
}

impl DataCheck {
    /// `quarantine`: how long a node does not vote after it may have lost data. `keeps_data`: a node that restarts with
    /// its mark has lost no data.
    pub fn new(prefix: &str, quarantine: Duration, keeps_data: bool) -> Self {
        Self {
            mark: key::data_mark(prefix),
            quarantine,
            keeps_data,
            clock: ClockEstimate::default(),
        }
    }

    /// Whether the user has set that a restarted node keeps its data (`assume_durable_nodes`).
    pub fn keeps_data(&self) -> bool {
        self.keeps_data
    }

    /// The clock of the node.
    pub fn clock(&self) -> &ClockEstimate {
        &self.clock
    }

    /// The call of lua/data.lua.
    pub fn call(&self) -> Pipeline {
        let mut call = redis::pipe();
        let eval = call.cmd("EVAL").arg(scripts::data_check()).arg(1);
        eval.arg(&self.mark).arg(self.quarantine.as_millis() as u64);
        eval.arg(u8::from(self.keeps_data));
        call
    }

    /// Reads the node's time from the reply to a call that was sent at `sent`. Returns false if lua/data.lua never
    /// gives this reply.
    pub fn read(&self, reply: &Value, sent: MonotonicTime) -> bool {
        let Value::Array(parts) = reply else {
            return false;
        };
        let [Value::BulkString(micros), Value::Int(_)] = parts.as_slice() else {
            return false;
        };
        let micros = std::str::from_utf8(micros).ok().and_then(id::number);
        if let Some(micros) = micros {
            self.clock.record(micros, sent, MonotonicTime::now());
        }
        micros.is_some()
    }
}

/// The client's estimate of a node's clock. The two bounds may come from two readings: each of them is right.
#[derive(Debug)]
pub struct ClockEstimate {
    /// The least time by which the node's clock is ahead of the client's, in µs. [`UNKNOWN`] before the first reading.
    least: AtomicI64,
    /// The greatest time by which the node's clock is ahead.
    most: AtomicI64,
}

const UNKNOWN: i64 = i64::MIN;

impl Default for ClockEstimate {
    fn default() -> Self {
        Self {
            least: AtomicI64::new(UNKNOWN),
            most: AtomicI64::new(UNKNOWN),
        }
    }
}

impl ClockEstimate {
    /// Records that the node's clock showed `micros` at some time between `sent` and `seen`.
    pub fn record(&self, micros: u64, sent: MonotonicTime, seen: MonotonicTime) {
        let ahead_of = |time| i64::try_from(micros).unwrap_or(i64::MAX) - micros_of(time);
        self.least.store(ahead_of(seen), Ordering::Relaxed);
        self.most.store(ahead_of(sent), Ordering::Relaxed);
    }

    /// The earliest time that the node's clock may show at `now`, in µs; `None` before the first connection to the
    /// node.
    pub fn at(&self, now: MonotonicTime) -> Option<u64> {
        shown(&self.least, now)
    }

    /// The latest time that the node's clock may show at `now`, in µs. `None` before the first connection to the node.
    pub fn latest_at(&self, now: MonotonicTime) -> Option<u64> {
        shown(&self.most, now)
    }
}

fn shown(ahead: &AtomicI64, now: MonotonicTime) -> Option<u64> {
    let ahead = ahead.load(Ordering::Relaxed);
    let micros = (ahead != UNKNOWN).then(|| micros_of(now).saturating_add(ahead))?;
    u64::try_from(micros).ok()
}

fn micros_of(now: MonotonicTime) -> i64 {
    let micros = now.since(MonotonicTime::at_tick(0)).as_micros();
    i64::try_from(micros).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    #[test]
    fn a_clock_goes_on_from_the_last_check() {
        let (clock, now) = (ClockEstimate::default(), MonotonicTime::now());
        let ms = |ms| now.after(Duration::from_millis(ms));
        assert_eq!((clock.at(now), clock.latest_at(now)), (None, None));
        // The reply took 2 ms.
        clock.record(1_795_263_780_943_818, now, ms(2));
        assert_eq!(clock.at(ms(5)), Some(1_795_263_780_946_818));
        assert_eq!(clock.latest_at(ms(5)), Some(1_795_263_780_948_818));
        // The node's clock was set back.
        clock.record(1_000, ms(5), ms(5));
        assert_eq!(clock.at(ms(6)), Some(2_000));
        assert_eq!(clock.latest_at(ms(6)), Some(2_000));
    }

    #[test]
    fn other_replies_are_no_check() {
        let check = DataCheck::new("p:", Duration::from_secs(1), false);
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        for reply in [
            Value::Okay,
            Value::Array(vec![text("17")]),
            Value::Array(vec![text("seventeen"), Value::Int(0)]),
            Value::Array(vec![Value::Int(17), Value::Int(0)]),
        ] {
            assert!(!check.read(&reply, MonotonicTime::now()), "{reply:?}");
        }
        assert_eq!(check.clock().at(MonotonicTime::now()), None);
        let reply = Value::Array(vec![text("17"), Value::Int(0)]);
        assert!(check.read(&reply, MonotonicTime::now()));
        assert!(check.clock().at(MonotonicTime::now()).is_some());
    }
}
