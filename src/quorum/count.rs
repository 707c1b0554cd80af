//! Counts the replies of a quorum's nodes and decides the outcome of a request. Does no I/O.

use std::time::Duration;

use crate::command::value::{LockValue, micros_of};
use crate::command::{Outcome, Reply};
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;
use crate::util::id::HolderId;
use crate::util::text::printable;

/// The number of nodes of a quorum.
#[derive(Clone, Copy, Debug)]
pub struct Count(usize);

/// The result of an acquire, from the replies that have come so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    /// No majority has granted the key.
    None,
    /// A majority has granted the key. If `is_stored`, a majority has stored the token, too.
    Token { token: u64, is_stored: bool },
}

impl Count {
    pub fn of(nodes: usize) -> Self {
        Self(nodes)
    }

    pub fn majority(self) -> usize {
        self.0 / 2 + 1
    }

    /// The greatest number of nodes that can fail while the others are a majority.
    pub fn minority(self) -> usize {
        self.0 - self.majority()
    }

    /// Whether further replies cannot change the outcome: a majority agrees; or no majority can agree any more, and a
    /// majority has voted or cannot vote any more. `outcomes` has an entry for each node.
    pub fn is_decided(self, outcomes: &[Option<Outcome>], agrees: impl Fn(&Reply) -> bool) -> bool {
        let (mut agreeing, mut refusing, mut pending) = (0, 0, 0);
        for outcome in outcomes {
            match outcome {
                Some(Ok(reply)) if agrees(reply) => agreeing += 1,
                vote if is_vote(vote) => refusing += 1,
                Some(_) => {}
                None => pending += 1,
            }
        }
        let (majority, votes) = (self.majority(), agreeing + refusing);
        let may_agree = agreeing + pending >= majority;
        let may_vote = votes < majority && votes + pending >= majority;
        agreeing >= majority || !(may_agree || may_vote)
    }

    /// Whether a majority has replied without an error.
    pub fn has_succeeded(self, outcomes: &[Option<Outcome>]) -> bool {
        let succeeded = outcomes.iter().flatten().filter(|outcome| outcome.is_ok());
        succeeded.count() >= self.majority()
    }

    /// Whether a majority has voted, perhaps for different leases.
    pub fn has_voted(self, outcomes: &[Option<Outcome>]) -> bool {
        outcomes.iter().filter(|one| is_vote(one)).count() >= self.majority()
    }

    /// The token of a grant: the greatest token of the majority with the smallest tokens. Each majority is correct;
    /// this one needs the fewest write-backs.
    pub fn grant(self, outcomes: &[Option<Outcome>]) -> Grant {
        let mut tokens: Vec<u64> = outcomes.iter().filter_map(granted).collect();
        tokens.sort_unstable();
        let Some(&token) = tokens.get(self.majority() - 1) else {
            return Grant::None;
        };
        let stored = outcomes.iter().filter(|one| has_stored(one, token));
        Grant::Token {
            token,
            is_stored: stored.count() >= self.majority(),
        }
    }

    /// The reply to an acquire that a majority has not granted. `None` unless a majority has voted, and at least one of
    /// its nodes for another lease. `Contended` if a majority has voted for other leases, and no node for this one.
    /// Otherwise `SplitVote`.
    pub fn contention(self, outcomes: &[Option<Outcome>]) -> Option<Reply> {
        let granted = outcomes.iter().filter_map(granted).count();
        let contended = |outcome: &Option<Outcome>| match outcome {
            Some(Ok(Reply::Contended { expires_in, .. })) => Some(*expires_in),
            _ => None,
        };
        let mut lefts: Vec<Duration> = outcomes.iter().filter_map(contended).collect();
        if lefts.is_empty() || granted + lefts.len() < self.majority() {
            return None;
        }
        lefts.sort_unstable();
        // When this many of the keys have expired, the key is free on a majority.
        let needed = self.majority().saturating_sub(granted).max(1);
        let expires_in = lefts[needed.min(lefts.len()) - 1];
        let may_be_taken = lefts.len() >= self.majority();
        Some(if granted == 0 && may_be_taken {
            Reply::Contended {
                expires_in,
                queued: None,
                shared: None,
            }
        } else {
            Reply::SplitVote {
                expires_in,
                may_be_taken,
            }
        })
    }

    /// The reply to a renewal, from the replies to its holds. `None` if it is unknown whether a majority holds the key.
    pub fn renewed(self, outcomes: &[Option<Outcome>]) -> Option<Reply> {
        let held = outcomes.iter().filter_map(granted).count();
        if held >= self.majority() {
            return Some(Reply::Done);
        }
        self.taken(outcomes)
    }

    /// Whether a renewal may set the key on nodes that lack it. The outcomes are those of its first holds. True in two
    /// cases: a majority holds the lease; or all nodes have replied, at least one of them holds the lease, and so few
    /// lack it that the lease is not lost.
    pub fn may_set(self, outcomes: &[Option<Outcome>]) -> bool {
        let held = outcomes.iter().filter_map(granted).count();
        let is_known = |outcome: &Option<Outcome>| matches!(outcome, Some(Ok(_)));
        held >= self.majority()
            || (held > 0 && self.taken(outcomes).is_none() && outcomes.iter().all(is_known))
    }

    /// Whether the reply to a release is known, or can no longer become known.
    pub fn is_release_decided(self, outcomes: &[Option<Outcome>]) -> bool {
        let answers = outcomes.iter().flatten();
        let failed = answers.clone().filter(|answer| answer.is_err()).count();
        let replied = answers.count() - failed;
        let has_replied = replied >= self.majority() && self.released(outcomes).is_some();
        has_replied || failed > self.minority()
    }

    /// The reply to a release, or to a release by force. `None` if a majority has not replied.
    pub fn released(self, outcomes: &[Option<Outcome>]) -> Option<Reply> {
        let is_done = |outcome: &&Option<Outcome>| matches!(outcome, Some(Ok(Reply::Done)));
        let done = outcomes.iter().filter(is_done).count();
        if done >= self.majority() {
            return Some(Reply::Done);
        }
        if let Some(reply) = self.taken(outcomes) {
            return Some(reply);
        }
        let is_refused =
            |outcome: &Option<Outcome>| matches!(outcome, Some(Ok(Reply::NotListening { .. })));
        if outcomes.iter().any(is_refused) {
            return Some(Reply::NotListening { by_some: done > 0 });
        }
        let released = outcomes.iter().filter(|one| has_released(one)).count();
        (done > 0 && released >= self.majority()).then_some(Reply::Done)
    }

    /// `Taken` or `Missing`, if so many nodes lack the lease that no majority can have it.
    fn taken(self, outcomes: &[Option<Outcome>]) -> Option<Reply> {
        let by = |outcome: &Option<Outcome>| match outcome {
            Some(Ok(Reply::Taken { by })) => Some(by.clone()),
            _ => None,
        };
        let takers: Vec<Option<HolderId>> = outcomes.iter().filter_map(by).collect();
        let is_missing = |outcome: &&Option<Outcome>| matches!(outcome, Some(Ok(Reply::Missing)));
        let missing = outcomes.iter().filter(is_missing).count();
        if takers.len() + missing <= self.minority() {
            return None;
        }
        // The holder that most nodes name.
        let votes = |by: &Option<HolderId>| takers.iter().filter(|other| *other == by).count();
        match takers.iter().max_by_key(|by| votes(by)) {
            Some(by) if votes(by) > missing => Some(Reply::Taken { by: by.clone() }),
            Some(by) if missing == 0 => Some(Reply::Taken { by: by.clone() }),
            _ => Some(Reply::Missing),
        }
    }

    /// The reply to an inspection. `None` if it is unknown whether a majority has one lease.
    pub fn found(self, outcomes: &[Option<Outcome>]) -> Option<Reply> {
        let mut values: Vec<(&LockValue, Option<Duration>)> = Vec::new();
        let mut unknown = 0;
        for outcome in outcomes {
            match outcome {
                Some(Ok(Reply::Found { value, expires_in })) => values.push((value, *expires_in)),
                Some(Ok(Reply::Missing)) => {}
                _ => unknown += 1,
            }
        }
        let votes = |value: &LockValue| {
            let same = |(other, _): &&(&LockValue, _)| other.lease == value.lease;
            values.iter().filter(same).count()
        };
        let first = values.iter().max_by_key(|(value, _)| votes(value));
        let most = first.map_or(0, |(value, _)| votes(value));
        if most < self.majority() {
            return (most + unknown < self.majority()).then_some(Reply::Missing);
        }
        let holder = first?.0;
        values.retain(|(value, _)| value.lease == holder.lease);
        // A majority of the nodes has this token or a greater one, and this time or a later one.
        let at = self.majority() - 1;
        let mut tokens: Vec<Option<u64>> = values.iter().map(|(value, _)| value.token).collect();
        tokens.sort_unstable_by(|one, other| other.cmp(one));
        let mut lefts: Vec<Duration> = values
            .iter()
            .map(|(_, left)| left.unwrap_or(Duration::MAX))
            .collect();
        lefts.sort_unstable_by(|one, other| other.cmp(one));
        Some(Reply::Found {
            value: Box::new(LockValue {
                token: tokens[at],
                queued: 0,
                ..holder.clone()
            }),
            expires_in: Some(lefts[at]).filter(|left| *left < Duration::MAX),
        })
    }

    /// The error if no majority agrees. Contains the answer of each node.
    pub fn no_majority(self, outcomes: &[Option<Outcome>], names: &[String]) -> Error {
        let answers = outcomes.iter().zip(names);
        let answers = answers.map(|(outcome, name)| answer(outcome.as_ref(), name));
        let answers: Vec<String> = answers.collect();
        let (majority, all) = (self.majority(), self.0);
        let answers = answers.join("; ");
        let message = match self.kind(outcomes) {
            ErrorKind::NoQuorum => format!("{majority} of {all} are needed: {answers}"),
            _ => answers,
        };
        Error::new(self.kind(outcomes), message)
    }

    /// The kind of the error: `NoQuorum`, unless more nodes than a minority have an error that a retry does not mend.
    fn kind(self, outcomes: &[Option<Outcome>]) -> ErrorKind {
        let lasting = |outcome: &Option<Outcome>| match outcome {
            Some(Err(error)) if !error.is_unavailable() => Some(error.kind()),
            _ => None,
        };
        let kinds: Vec<ErrorKind> = outcomes.iter().filter_map(lasting).collect();
        match kinds.first() {
            Some(kind) if kinds.len() > self.minority() => *kind,
            _ => ErrorKind::NoQuorum,
        }
    }
}

/// Whether the outcome shows which lease holds the key, if any. A node that abstains, or got the request too late, does
/// not show this.
fn is_vote(outcome: &Option<Outcome>) -> bool {
    matches!(
        outcome,
        Some(Ok(Reply::Granted { .. }
            | Reply::Contended { .. }
            | Reply::Taken { .. }
            | Reply::Found { .. }
            | Reply::Missing))
    )
}

/// Whether the node does not have the lease's key after a release. This includes a node that never had the key, or lost
/// it.
pub fn has_released(outcome: &Option<Outcome>) -> bool {
    matches!(
        outcome,
        Some(Ok(Reply::Done
            | Reply::Missing
            | Reply::Taken { .. }
            | Reply::Abstained { .. }))
    )
}

/// The token of a node that has granted the key, or holds it.
fn granted(outcome: &Option<Outcome>) -> Option<u64> {
    match outcome {
        Some(Ok(Reply::Granted { token, .. })) => Some(*token),
        _ => None,
    }
}

/// Whether the node has stored the token or a greater one under the lease.
pub fn has_stored(outcome: &Option<Outcome>, token: u64) -> bool {
    granted(outcome).is_some_and(|stored| micros_of(stored) >= micros_of(token))
}

/// The answer of a node that refuses a token.
pub const TOO_FAR_AHEAD: &str =
    "the token is later than its clock by more than `max_ttl`; compare the clocks of the nodes";

/// The greatest length of one node's answer in an error, in bytes.
const LONGEST_ANSWER: usize = 180;

/// The answer of one node, for an error.
pub fn answer(outcome: Option<&Outcome>, name: &str) -> String {
    printable(&whole_answer(outcome, name), LONGEST_ANSWER).into_owned()
}

fn whole_answer(outcome: Option<&Outcome>, name: &str) -> String {
    let said = match outcome {
        None => "no reply in time".to_owned(),
        Some(Err(error)) if error.names(name) => return error.message().to_owned(),
        Some(Err(error)) if error.message().is_empty() => "no reply in time".to_owned(),
        Some(Err(error)) => error.message().to_owned(),
        Some(Ok(Reply::Abstained { for_another })) => {
            format!("may have lost data, and does not vote for {for_another:.1?}")
        }
        Some(Ok(Reply::TooLate { .. })) => {
            "got the request too late: it was stopped, or its clock was set forward".to_owned()
        }
        Some(Ok(Reply::TooFarAhead)) => TOO_FAR_AHEAD.to_owned(),
        Some(Ok(Reply::Contended { .. } | Reply::Found { .. })) => "held".to_owned(),
        Some(Ok(Reply::Taken { by })) => LossReason::TakenOver { by: by.clone() }.to_string(),
        Some(Ok(Reply::Missing)) => "not held".to_owned(),
        Some(Ok(reply)) if reply.is_success() => "agrees".to_owned(),
        Some(Ok(_)) => "disagrees".to_owned(),
    };
    format!("{name}: {said}")
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::util::id::LeaseId;

    fn grants(tokens: &[u64]) -> Vec<Option<Outcome>> {
        let granted = |token: &u64| Some(Ok(Reply::granted(token << 10)));
        tokens.iter().map(granted).collect()
    }

    fn contended(seconds: u64) -> Option<Outcome> {
        Some(Ok(Reply::Contended {
            expires_in: Duration::from_secs(seconds),
            queued: None,
            shared: None,
        }))
    }

    fn taken(by: &str) -> Option<Outcome> {
        let by = Some(HolderId::of_text(by));
        Some(Ok(Reply::Taken { by }))
    }

    fn failed(kind: ErrorKind) -> Option<Outcome> {
        Some(Err(Error::new(kind, "why")))
    }

    fn value(lease: LeaseId, micros: u64) -> LockValue {
        LockValue {
            lease,
            token: Some(micros << 10),
            holder: HolderId::of_text("host/1/a"),
            queued: 0,
        }
    }

    fn token(token: u64, is_stored: bool) -> Grant {
        let token = token << 10;
        Grant::Token { token, is_stored }
    }

    #[test]
    fn a_majority_is_more_than_half() {
        let majorities = (1..=9).map(|nodes| Count::of(nodes).majority());
        assert_eq!(majorities.collect::<Vec<_>>(), [1, 2, 2, 3, 3, 4, 4, 5, 5]);
    }

    #[test]
    fn the_token_is_the_greatest_of_the_smallest_majority() {
        for (nodes, tokens, wanted) in [
            (1, &[7][..], token(7, true)),
            (3, &[7], Grant::None),
            (3, &[7, 7], token(7, true)),
            (3, &[8, 7], token(8, false)),
            // Two nodes have stored 8 or more.
            (3, &[9, 7, 8], token(8, true)),
            (5, &[4, 9, 6, 8, 7], token(7, true)),
            (5, &[4, 9, 6, 8], token(8, false)),
            (4, &[6, 6, 7], token(7, false)),
            (4, &[6, 6], Grant::None),
        ] {
            let mut outcomes = grants(tokens);
            outcomes.resize(nodes, None);
            assert_eq!(Count::of(nodes).grant(&outcomes), wanted, "{tokens:?}");
        }
    }

    #[test]
    fn a_decision_waits_for_a_majority() {
        let three = Count::of(3);
        let is_decided = |outcomes: &[Option<Outcome>]| {
            three.is_decided(outcomes, |reply| matches!(reply, Reply::Granted { .. }))
        };
        let away = || failed(ErrorKind::Timeout);
        let granted = || grants(&[7]).remove(0);
        assert!(!is_decided(&[granted(), None, None]));
        assert!(!is_decided(&[granted(), contended(1), None]));
        assert!(!is_decided(&[None, away(), None]));
        assert!(is_decided(&[granted(), None, granted()]));
        assert!(is_decided(&[None, contended(1), contended(1)]));
        // No majority has granted the key. One of the nodes may have replied that it is taken.
        for refusal in [contended(1), taken("x"), Some(Ok(Reply::Missing))] {
            assert!(!is_decided(&[away(), refusal.clone(), None]));
            assert!(is_decided(&[away(), refusal, away()]));
        }
        let late = Some(Ok(Reply::TooLate { micros: 7 }));
        assert!(
            is_decided(&[late.clone(), late, None]),
            "the third vote decides nothing"
        );
    }

    #[test]
    fn a_node_that_abstains_has_not_voted() {
        let three = Count::of(3);
        let granted = || grants(&[7]).remove(0);
        let for_another = Duration::from_secs(1);
        let found = Reply::Found {
            value: Box::new(value(LeaseId::random(), 7)),
            expires_in: None,
        };
        let votes = [Reply::Missing, found].map(|reply| Some(Ok(reply)));
        for vote in votes
            .into_iter()
            .chain([granted(), contended(1), taken("x")])
        {
            assert!(!three.has_voted(&[vote.clone(), None, None]));
            assert!(three.has_voted(&[vote.clone(), Some(Ok(Reply::Missing)), None]));
            for no_vote in [
                Some(Ok(Reply::Abstained { for_another })),
                Some(Ok(Reply::TooLate { micros: 7 })),
                Some(Ok(Reply::TooFarAhead)),
                failed(ErrorKind::Timeout),
            ] {
                assert!(!three.has_voted(&[vote.clone(), no_vote, None]));
            }
        }
    }

    #[test]
    fn contention_needs_the_votes_of_a_majority() {
        let left =
            |nodes, outcomes: &[Option<Outcome>]| match Count::of(nodes).contention(outcomes)? {
                Reply::Contended { expires_in, .. } => Some(expires_in.as_secs()),
                Reply::SplitVote {
                    expires_in,
                    may_be_taken,
                } => Some(if may_be_taken { 100 } else { 200 } + expires_in.as_secs()),
                other => panic!("{other:?}"),
            };
        let none = || failed(ErrorKind::Unavailable);
        let granted = || grants(&[7]).remove(0);
        assert_eq!(
            left(3, &[contended(3), contended(1), contended(2)]),
            Some(2)
        );
        // Three leases, or two of them, have split the votes.
        assert_eq!(left(3, &[granted(), contended(3), contended(1)]), Some(101));
        assert_eq!(left(3, &[granted(), contended(3), None]), Some(203));
        assert_eq!(left(3, &[none(), contended(3), none()]), None);
        assert_eq!(left(3, &[none(), granted(), none()]), None);
        assert_eq!(
            left(4, &[granted(), granted(), contended(4), None]),
            Some(204)
        );
        let abstained = Reply::Abstained {
            for_another: Duration::ZERO,
        };
        let abstained = || Some(Ok(abstained.clone()));
        assert_eq!(left(3, &[abstained(), abstained(), contended(1)]), None);
    }

    #[test]
    fn a_lease_is_lost_when_no_majority_can_hold_it() {
        let renewed = |outcomes: &[Option<Outcome>]| Count::of(3).renewed(outcomes);
        let granted = || grants(&[7]).remove(0);
        let by_b = || Reply::Taken {
            by: Some(HolderId::of_text("host/2/b")),
        };
        assert_eq!(
            renewed(&[granted(), granted(), taken("host/2/b")]),
            Some(Reply::Done)
        );
        assert_eq!(renewed(&[granted(), None, taken("host/2/b")]), None);
        assert_eq!(
            renewed(&[granted(), failed(ErrorKind::Timeout), taken("host/2/b")]),
            None
        );
        let missing = || Some(Ok(Reply::Missing));
        let done = Some(Reply::Done);
        assert_eq!(renewed(&[granted(), granted(), missing()]), done);
        assert_eq!(renewed(&[granted(), missing(), None]), None);
        let gone = Some(Reply::Missing);
        assert_eq!(renewed(&[granted(), missing(), missing()]), gone);
        assert_eq!(renewed(&[missing(), missing(), taken("host/2/b")]), gone);
        // A node that may have lost its data does not report that the lease is lost.
        let abstains = Some(Ok(Reply::Abstained {
            for_another: Duration::ZERO,
        }));
        assert_eq!(renewed(&[granted(), missing(), abstains.clone()]), None);
        let may_set = |outcomes: &[Option<Outcome>]| Count::of(3).may_set(outcomes);
        assert!(may_set(&[granted(), granted(), missing()]));
        assert!(may_set(&[granted(), granted(), None]));
        assert!(may_set(&[granted(), missing(), abstains]));
        // The node without a reply may lack the key, too: the lease may have been released by force.
        assert!(!may_set(&[granted(), missing(), None]));
        assert!(!may_set(&[
            granted(),
            missing(),
            failed(ErrorKind::Timeout)
        ]));
        assert!(!may_set(&[granted(), missing(), missing()]));
        assert_eq!(
            renewed(&[granted(), taken("host/2/b"), taken("host/2/b")]),
            Some(by_b())
        );
    }

    #[test]
    fn a_release_needs_a_majority() {
        let released = |outcomes: &[Option<Outcome>]| Count::of(3).released(outcomes);
        let done = || Some(Ok(Reply::Done));
        let missing = || Some(Ok(Reply::Missing));
        let refused = |by_some| Reply::NotListening { by_some };
        let deaf = || Some(Ok(refused(false)));
        assert_eq!(released(&[done(), None, done()]), Some(Reply::Done));
        assert_eq!(released(&[done(), missing(), done()]), Some(Reply::Done));
        assert_eq!(released(&[done(), missing(), None]), Some(Reply::Done));
        assert_eq!(released(&[done(), None, failed(ErrorKind::Timeout)]), None);
        assert_eq!(released(&[missing(), None, None]), None);
        assert_eq!(released(&[deaf(), done(), missing()]), Some(refused(true)));
        assert_eq!(
            released(&[done(), missing(), missing()]),
            Some(Reply::Missing)
        );
        assert_eq!(
            released(&[missing(), taken("host/2/b"), taken("host/2/b")]),
            Some(taken("host/2/b").unwrap().unwrap())
        );
        assert_eq!(released(&[deaf(), deaf(), None]), Some(refused(false)));
    }

    /// Two nodes have restarted without their data. They do not know whether the lease was lost.
    #[test]
    fn nodes_without_data_lose_no_lease() {
        let three = Count::of(3);
        let done = || Some(Ok(Reply::Done));
        let missing = || Some(Ok(Reply::Missing));
        let lost = || {
            let for_another = Duration::from_secs(1);
            Some(Ok(Reply::Abstained { for_another }))
        };
        for (outcomes, wanted, is_decided) in [
            ([lost(), lost(), done()], Some(Reply::Done), true),
            ([lost(), missing(), done()], Some(Reply::Done), true),
            ([lost(), done(), None], Some(Reply::Done), true),
            ([lost(), lost(), missing()], None, false),
            ([lost(), lost(), None], None, false),
            ([lost(), missing(), missing()], Some(Reply::Missing), true),
            (
                [
                    failed(ErrorKind::Timeout),
                    failed(ErrorKind::Timeout),
                    done(),
                ],
                None,
                true,
            ),
            ([missing(), None, None], None, false),
        ] {
            assert_eq!(three.released(&outcomes), wanted, "{outcomes:?}");
            assert_eq!(
                three.is_release_decided(&outcomes),
                is_decided,
                "{outcomes:?}"
            );
        }
        assert_eq!(three.found(&[lost(), lost(), missing()]), None);
        let free = three.found(&[lost(), missing(), missing()]);
        assert_eq!(free, Some(Reply::Missing));
    }

    #[test]
    fn a_majority_says_which_lease_holds_the_key() {
        let [a, b] = [LeaseId::random(), LeaseId::random()];
        let found = |lease, micros: u64, seconds| {
            Some(Ok(Reply::Found {
                value: Box::new(value(lease, micros)),
                expires_in: Some(Duration::from_secs(seconds)),
            }))
        };
        let missing = || Some(Ok(Reply::Missing));
        let three = Count::of(3);
        for (outcomes, wanted) in [
            (vec![missing(), missing(), None], Some(missing())),
            (vec![found(a, 7, 5), missing(), None], None),
            (vec![found(a, 7, 5), found(b, 8, 5), None], None),
            (
                vec![found(a, 7, 5), found(b, 8, 5), missing()],
                Some(missing()),
            ),
            // A majority needs both nodes, so the smaller token and the shorter time count.
            (
                vec![found(a, 7, 5), None, found(a, 9, 3)],
                Some(found(a, 7, 3)),
            ),
            (
                vec![found(a, 7, 5), found(a, 8, 4), found(a, 9, 3)],
                Some(found(a, 8, 4)),
            ),
            (
                vec![found(b, 7, 5), found(a, 8, 4), found(a, 9, 3)],
                Some(found(a, 8, 3)),
            ),
        ] {
            let wanted = wanted.map(|outcome| outcome.unwrap().unwrap());
            assert_eq!(three.found(&outcomes), wanted, "{outcomes:?}");
        }
    }

    #[test]
    fn an_error_names_each_node() {
        let names: Vec<String> = (1..=7).map(|n| format!("host:{n}")).collect();
        let outcomes = [
            None,
            failed(ErrorKind::Timeout),
            Some(Err(Error::new(ErrorKind::Unavailable, "host:3: refused"))),
            contended(1),
            grants(&[7]).remove(0),
            Some(Ok(Reply::TooLate { micros: 7 })),
            Some(Ok(Reply::TooFarAhead)),
        ];
        let error = Count::of(7).no_majority(&outcomes, &names);
        assert_eq!(
            error.message(),
            "4 of 7 are needed: host:1: no reply in time; host:2: why; host:3: refused; \
             host:4: held; host:5: agrees; host:6: got the request too late: it was stopped, or its \
             clock was set forward; host:7: the token is later than its clock by more than `max_ttl`; compare \
             the clocks of the nodes"
        );
        assert_eq!(error.kind(), ErrorKind::NoQuorum);
        // Each node's answer is in the error, even if the answers of the others are long.
        let long = || {
            failed(ErrorKind::Unavailable)
                .map(|_| Err(Error::new(ErrorKind::Denied, "x".repeat(400))))
        };
        let names: Vec<String> = (1..=9).map(|n| format!("host:{n}")).collect();
        let outcomes: Vec<Option<Outcome>> =
            (0..9).map(|n| if n < 4 { long() } else { None }).collect();
        let error = Count::of(9).no_majority(&outcomes, &names);
        assert!(names.iter().all(|name| error.names(name)), "{error}");
    }

    #[test]
    fn a_lasting_error_of_more_than_a_minority_is_the_kind() {
        let kind = |kinds: [ErrorKind; 3]| Count::of(3).kind(&kinds.map(failed));
        let (denied, away) = (ErrorKind::Denied, ErrorKind::Unavailable);
        assert_eq!(kind([denied, away, away]), ErrorKind::NoQuorum);
        assert_eq!(kind([away, denied, denied]), denied);
    }
}
