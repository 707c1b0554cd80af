//! Queries for the slot map: one node, or several nodes in turn until one answers.

use std::time::Duration;

use crate::cluster::slot_map::{SlotRange, read_ranges};
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::{Clock, MonotonicTime};
use crate::wire::connect::connection::ReplyContents;
use crate::wire::connect::url::HostPort;
use crate::wire::endpoint::Endpoint;

/// A round of queries divides the remaining time into at most this many parts. Connecting to a silent node takes one
/// part. After a round without an answer, at most this many nodes are asked again.
const SHARES: usize = 4;

/// Asks these nodes in turn until one answers. All nodes share one time, the sum of `connect_timeout` and
/// `command_timeout`, and connecting to a node takes only a part of it. So a silent node does not use up the time of
/// the others. After a round without an answer, up to [`SHARES`] nodes whose connect was cut short are asked again.
/// Each of them gets the whole `connect_timeout`: the network may be slow. Returns the first error if no node answers.
pub fn ask_in_turn<T>(
    nodes: &[HostPort],
    (connect_timeout, command_timeout): (Duration, Duration),
    clock: &Clock,
    mut ask: impl FnMut(&HostPort, Duration) -> Result<T, Error>,
) -> Result<T, Error> {
    let deadline = clock.now().after(connect_timeout + command_timeout);
    let mut first_error = None;
    let mut hurried = Vec::new();
    for (node, left) in nodes.iter().zip((1..=nodes.len()).rev()) {
        let asked_at = clock.now();
        let time = part_of(deadline.since(asked_at), left);
        if time.is_zero() {
            hurried.push(node);
            continue;
        }
        match ask(node, time) {
            Ok(answer) => return Ok(answer),
            Err(error) => {
                if time < connect_timeout && clock.now().since(asked_at) >= time {
                    hurried.push(node);
                }
                first_error.get_or_insert(error);
            }
        }
    }
    for node in hurried.into_iter().take(SHARES) {
        match ask(node, connect_timeout) {
            Ok(answer) => return Ok(answer),
            Err(error) => _ = first_error.get_or_insert(error),
        }
    }
    let none = "no node of the Cluster is known; name some of them in the URL";
    Err(first_error.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, none)))
}

/// The part of `time` in which to connect to the next of `nodes` nodes.
fn part_of(time: Duration, nodes: usize) -> Duration {
    time / u32::try_from(nodes.clamp(1, SHARES)).expect("it is small")
}

/// Asks the node at `address` for the slot map. Connects within `connecting_time`, and within `connect_timeout`.
pub fn ask(
    endpoint: &Endpoint,
    address: &HostPort,
    connecting_time: Duration,
    command_timeout: Duration,
) -> Result<Vec<SlotRange>, Error> {
    let mut connection = endpoint.open_within(connecting_time)?;
    let deadline = MonotonicTime::now().after(command_timeout);
    let reply = connection.ask("CLUSTER", &["SLOTS"], deadline, ReplyContents::SlotMap)?;
    let about = |kind, what: &str| Error::new(kind, format!("{}: {what}", endpoint.address()));
    match read_ranges(reply, address) {
        Some(ranges) if ranges.is_empty() => {
            let what = "no slot of the Cluster has a master yet; wait until `redis-cli --cluster create` has ended";
            Err(about(ErrorKind::Unavailable, what))
        }
        Some(ranges) => Ok(ranges),
        None => {
            let what = "the reply to CLUSTER SLOTS is none of a Redis Cluster; check whether a proxy answers there";
            Err(about(ErrorKind::Protocol, what))
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    /// Asks `count` nodes. Each is silent for all of its time, unless `answers` returns its answer. Returns the order
    /// in which the nodes were asked, and the outcome.
    fn asked(
        count: u16,
        answers: impl Fn(u16, Duration) -> Option<Result<(), Error>>,
    ) -> (Vec<u16>, Result<(), Error>) {
        let node = |port| HostPort {
            host: "h".to_owned(),
            port,
        };
        let nodes: Vec<HostPort> = (1..=count).map(node).collect();
        let timeout = Duration::from_secs(1);
        let clock = Clock::movable();
        let mut order = Vec::new();
        let outcome = ask_in_turn(&nodes, (timeout, timeout), &clock, |node, time| {
            order.push(node.port);
            answers(node.port, time).unwrap_or_else(|| {
                clock.advance(time);
                Err(Error::new(ErrorKind::Unavailable, "late"))
            })
        });
        (order, outcome)
    }

    #[test]
    fn nodes_that_had_too_little_time_are_asked_again() {
        let refused = || Some(Err(Error::new(ErrorKind::Denied, "no")));
        // A slow node needs the whole time-out of a second.
        let (order, outcome) = asked(5, |node, time| match node {
            2 => refused(),
            4 => (time == Duration::from_secs(1)).then_some(Ok(())),
            _ => None,
        });
        outcome.unwrap();
        assert_eq!(order, [1, 2, 3, 4, 5, 1, 3, 4]);
        // The round ends even if all nodes are silent.
        let (order, outcome) = asked(6, |_, _| None);
        assert_eq!(order, [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]);
        assert_eq!(outcome.unwrap_err().message(), "late");
        // A single node gets all of the time, and is asked once.
        let (order, _) = asked(1, |_, time| {
            assert!(time > Duration::from_secs(1));
            None
        });
        assert_eq!(order, [1]);
    }

    #[test]
    fn silent_nodes_leave_time_for_others() {
        let parts = [6, 4, 2, 1].map(|nodes| part_of(Duration::from_secs(8), nodes));
        assert_eq!(parts, [2, 2, 4, 8].map(Duration::from_secs));
    }
}
