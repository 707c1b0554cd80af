//! The check that each connection to a node of a quorum begins with: whether the node's process is a new one, which may
//! have lost data.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use redis::{Pipeline, Value};

use crate::store::redis::scripts;
use crate::util::clock::MonotonicTime;
use crate::util::id;
use crate::util::key;

/// The check of one node, and the clock of the node as of the last check.
pub(crate) struct DataCheck {
    mark: String,
    quarantine: Duration,
    /// The node loses no data when it restarts.
    keeps_data: bool,
    clock: NodeClock,
}

impl DataCheck {
    /// `quarantine`: how long a node does not vote after it may have lost data. `keeps_data`: a node that restarts with
    /// its mark has lost none.
    pub(crate) fn new(prefix: &str, quarantine: Duration, keeps_data: bool) -> Self {
        Self {
            mark: key::data_mark(prefix),
            quarantine,
            keeps_data,
            clock: NodeClock::default(),
        }
    }

    /// The clock of the node.
    pub(crate) fn clock(&self) -> &NodeClock {
        &self.clock
    }

    /// The call of lua/data.lua.
    pub(super) fn call(&self) -> Pipeline {
        let mut call = redis::pipe();
        let eval = call.cmd("EVAL").arg(scripts::data_check()).arg(1);
        eval.arg(&self.mark).arg(self.quarantine.as_millis() as u64);
        eval.arg(u8::from(self.keeps_data));
        call
    }

    /// Notes the node's time from the reply. Returns false if lua/data.lua cannot give this reply.
    pub(super) fn read(&self, reply: &Value) -> bool {
        let Value::Array(parts) = reply else {
            return false;
        };
        let [Value::BulkString(micros), Value::Int(_)] = parts.as_slice() else {
            return false;
        };
        let micros = std::str::from_utf8(micros).ok().and_then(id::number);
        if let Some(micros) = micros {
            self.clock.note(micros, MonotonicTime::now());
        }
        micros.is_some()
    }
}

/// The clock of a node, as the client estimates it.
#[derive(Debug)]
pub(crate) struct NodeClock(
    /// How far the node's clock is ahead of this client's clock, in µs. [`UNKNOWN`] before the first check.
    AtomicI64,
);

const UNKNOWN: i64 = i64::MIN;

impl Default for NodeClock {
    fn default() -> Self {
        Self(AtomicI64::new(UNKNOWN))
    }
}

impl NodeClock {
    /// Notes that the node's clock showed `micros` at `now`, or a little before.
    pub(crate) fn note(&self, micros: u64, now: MonotonicTime) {
        let ahead = i64::try_from(micros).unwrap_or(i64::MAX) - micros_of(now);
        self.0.store(ahead, Ordering::Relaxed);
    }

    /// The time of the node at `now` in µs; `None` if no connection to the node was made yet.
    pub(crate) fn at(&self, now: MonotonicTime) -> Option<u64> {
        let ahead = self.0.load(Ordering::Relaxed);
        let micros = (ahead != UNKNOWN).then(|| micros_of(now).saturating_add(ahead))?;
        u64::try_from(micros).ok()
    }
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
        let (clock, now) = (NodeClock::default(), MonotonicTime::now());
        assert_eq!(clock.at(now), None);
        clock.note(1_795_263_780_943_818, now);
        let later = clock.at(now.after(Duration::from_millis(5)));
        assert_eq!(later, Some(1_795_263_780_948_818));
        // The node's clock was set back.
        clock.note(1_000, now.after(Duration::from_millis(5)));
        assert_eq!(clock.at(now.after(Duration::from_millis(6))), Some(2_000));
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
            assert!(!check.read(&reply), "{reply:?}");
        }
        assert_eq!(check.clock().at(MonotonicTime::now()), None);
        assert!(check.read(&Value::Array(vec![text("17"), Value::Int(0)])));
        assert!(check.clock().at(MonotonicTime::now()).is_some());
    }
}
