//! Reports the late releases of a quorum, from the reports of its nodes. A release is late if its caller got no reply
//! from a majority, or if its first attempt failed at more nodes than a minority. Also reports a lock as lost if more
//! nodes than a minority did not have the released lease, unless its caller learns of the loss. Sends no requests.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::command::Outcome;
use crate::config::key::Key;
use crate::quorum::count::{Count, answer};
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;
use crate::store::{LateRelease, Report, ReportedReleases, Reports};

pub struct QuorumLateReleases {
    reports: Reports,
    count: Count,
    names: Vec<String>,
    /// The releases that at least one node has not ended yet, by key and fencing token: [`MAX_OPEN`] at most.
    open: Mutex<HashMap<(Key, u64), Progress>>,
}

/// The progress of one release. Each `u16` is a set of nodes, with one bit for each.
#[derive(Debug, Default)]
struct Progress {
    /// The nodes whose first attempt failed.
    late: u16,
    confirmed: u16,
    /// The nodes at which the client no longer repeats the release.
    given_up: u16,
    /// The nodes that did not have the lease at the first attempt, within its validity.
    lost: u16,
    /// Why the last of these nodes did not have the lease. `None` after the loss is reported.
    loss: Option<Box<LossReason>>,
    /// Whether a caller waits. A delay and a loss are reported only after the caller has the outcome.
    is_awaited: bool,
    /// True once the loss is reported, or once the caller has a reply, which tells it whether the lock was lost.
    is_loss_known: bool,
    /// True once the delay is reported, or once the caller has a reply, and so knows that the release was not late.
    is_delay_known: bool,
}

/// The greatest number of open releases. The delay of further ones is not reported. A release may stay open for good: a
/// node of a Cluster may redirect the release, and then does not report its end.
const MAX_OPEN: usize = 1 << 18;

/// An empty map of open releases is made anew if it has more room than this.
const ROOM_TO_KEEP: usize = 1024;

/// The number of nodes in a set.
fn size(nodes: u16) -> usize {
    nodes.count_ones() as usize
}

impl Progress {
    fn is_confirmed(&self, count: Count) -> bool {
        size(self.confirmed) >= count.majority()
    }

    /// Takes the reason of a loss that has to be reported now.
    fn take_loss(&mut self, count: Count) -> Option<LossReason> {
        let is_lost = size(self.lost) > count.minority();
        let is_due = is_lost && !self.is_awaited && !self.is_loss_known;
        self.is_loss_known |= is_due;
        self.loss.take_if(|_| is_due).map(|reason| *reason)
    }

    /// Whether the first attempt failed at so many nodes that the release is late, and this was not reported yet.
    fn is_late(&self, count: Count) -> bool {
        !self.is_delay_known && size(self.late) > count.minority() && !self.is_confirmed(count)
    }
}

impl QuorumLateReleases {
    pub fn new(reports: Reports, names: Vec<String>) -> Arc<Self> {
        Arc::new(Self {
            reports,
            count: Count::of(names.len()),
            names,
            open: Mutex::default(),
        })
    }

    /// How many releases at least one node has not ended yet.
    #[cfg(test)]
    pub fn open(&self) -> usize {
        self.open.lock().len()
    }

    /// The receiver of one node's reports about releases.
    pub fn of_node(
        self: &Arc<Self>,
        node: usize,
    ) -> impl Fn(&Key, u64, LateRelease) + Send + Sync + use<> {
        let releases = Arc::clone(self);
        move |key, token, report| releases.record(node, key, token, report)
    }

    /// Records a release before it is sent to all nodes. If `is_awaited`, the caller calls [`leave`](Self::leave)
    /// later. Returns false if the client has no receiver of these reports.
    pub fn begin(&self, key: &Key, token: u64, is_awaited: bool) -> bool {
        if self.reports.releases == ReportedReleases::None {
            return false;
        }
        let mut open = self.open.lock();
        let release = (key.clone(), token);
        if open.len() < MAX_OPEN || open.contains_key(&release) {
            open.entry(release).or_default().is_awaited = is_awaited;
        }
        true
    }

    /// Records that the caller has the outcome. After an error, reports the delay now, and a loss if one is found
    /// later. After a reply, reports nothing more about this release.
    pub fn leave(&self, key: &Key, token: u64, outcome: &Outcome) {
        self.change(key, token, |progress| {
            progress.is_awaited = false;
            match outcome {
                Err(error) => self.report_delay(progress, key, token, error.clone()),
                Ok(_) => {
                    progress.is_delay_known = true;
                    progress.is_loss_known = true;
                }
            }
        });
    }

    fn record(&self, node: usize, key: &Key, token: u64, report: LateRelease) {
        let bit = 1 << node;
        match report {
            LateRelease::Delayed(error) => self.change(key, token, |progress| {
                progress.late |= bit;
                if !progress.is_awaited && progress.is_late(self.count) {
                    self.report_delay(progress, key, token, self.error(node, error));
                }
            }),
            LateRelease::Ended { confirmed: true } => {
                self.change(key, token, |progress| progress.confirmed |= bit);
            }
            LateRelease::Ended { confirmed: false } => {
                self.change(key, token, |progress| progress.given_up |= bit);
            }
            LateRelease::Lost(reason) => self.change(key, token, |progress| {
                progress.lost |= bit;
                progress.loss = Some(Box::new(reason));
            }),
        }
    }

    /// The error of a late release, from the error of the last node that made it late.
    fn error(&self, node: usize, error: Error) -> Error {
        let kind = if error.is_unavailable() {
            ErrorKind::NoQuorum
        } else {
            error.kind()
        };
        let reason = answer(Some(&Err(error)), &self.names[node]);
        Error::new(kind, format!("no majority has released the lock: {reason}"))
    }

    /// Changes a release's progress, reports a loss, and removes the entry once the release has ended on all nodes.
    fn change(&self, key: &Key, token: u64, change: impl FnOnce(&mut Progress)) {
        let mut open = self.open.lock();
        let Entry::Occupied(mut release) = open.entry((key.clone(), token)) else {
            return;
        };
        let progress = release.get_mut();
        change(progress);
        if let Some(reason) = progress.take_loss(self.count) {
            let lost = LateRelease::Lost(reason);
            self.reports.send(Report::Release(key, token, lost));
        }
        let ended = size(progress.confirmed | progress.given_up);
        if !progress.is_awaited && ended == self.names.len() {
            release.remove();
            if open.is_empty() && open.capacity() > ROOM_TO_KEEP {
                *open = HashMap::new();
            }
        }
    }

    fn report_delay(&self, progress: &mut Progress, key: &Key, token: u64, error: Error) {
        progress.is_delay_known = true;
        let late = LateRelease::Delayed(error);
        self.reports.send(Report::Release(key, token, late));
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::command::Reply;

    const NODES: usize = 5;
    const TOKEN: u64 = 7;

    #[derive(Clone, Debug, PartialEq)]
    enum Event {
        Lost,
        Delayed(ErrorKind),
    }

    const DELAYED: Event = Event::Delayed(ErrorKind::NoQuorum);

    struct Fixture {
        releases: Arc<QuorumLateReleases>,
        events: Arc<Mutex<Vec<Event>>>,
        /// The texts of the errors.
        texts: Arc<Mutex<Vec<String>>>,
        key: Key,
    }

    impl Fixture {
        fn new(is_awaited: bool) -> Self {
            Self::of(NODES, is_awaited)
        }

        fn of(nodes: usize, is_awaited: bool) -> Self {
            let events: Arc<Mutex<Vec<Event>>> = Arc::default();
            let texts: Arc<Mutex<Vec<String>>> = Arc::default();
            let (reported, errors) = (Arc::clone(&events), Arc::clone(&texts));
            let reports = Reports::new(ReportedReleases::Late, move |report| {
                let Report::Release(_, TOKEN, report) = report else {
                    panic!("not a report of the release");
                };
                reported.lock().push(match report {
                    LateRelease::Delayed(error) => {
                        errors.lock().push(error.to_string());
                        Event::Delayed(error.kind())
                    }
                    LateRelease::Lost(_) => Event::Lost,
                    other => panic!("{other:?}"),
                });
            });
            let names = (0..nodes).map(|node| format!("node {node}")).collect();
            let releases = QuorumLateReleases::new(reports, names);
            let key = Key::new("p:", "k", 100).unwrap();
            releases.begin(&key, TOKEN, is_awaited);
            Self {
                releases,
                events,
                texts,
                key,
            }
        }

        fn delay(&self, node: usize) {
            let error = Error::new(ErrorKind::Unavailable, "away");
            self.record(node, LateRelease::Delayed(error));
        }

        fn end(&self, node: usize, confirmed: bool) {
            self.record(node, LateRelease::Ended { confirmed });
        }

        fn record(&self, node: usize, report: LateRelease) {
            self.releases.of_node(node)(&self.key, TOKEN, report);
        }

        fn leave(&self, is_released: bool) {
            let outcome = if is_released {
                Ok(Reply::Done)
            } else {
                Err(Error::new(ErrorKind::NoQuorum, ""))
            };
            self.releases.leave(&self.key, TOKEN, &outcome);
        }

        #[track_caller]
        fn assert_events(&self, expected: &[Event]) {
            assert_eq!(*self.events.lock(), expected);
        }

        fn is_forgotten(&self) -> bool {
            self.releases.open() == 0
        }
    }

    #[test]
    fn late_nodes_of_a_minority_report_nothing() {
        let f = Fixture::new(false);
        (0..3).for_each(|node| f.end(node, true));
        f.delay(3);
        f.delay(4);
        f.end(3, true);
        assert!(!f.is_forgotten());
        f.end(4, false);
        f.assert_events(&[]);
        assert!(f.is_forgotten());
    }

    #[test]
    fn a_release_is_late_once_no_majority_has_done_it_at_first() {
        for confirmed in [true, false] {
            let f = Fixture::new(false);
            f.delay(0);
            f.delay(1);
            f.assert_events(&[]);
            f.delay(2);
            f.assert_events(&[DELAYED]);
            let text = f.texts.lock()[0].clone();
            let reason = "no majority has released the lock: node 2: away";
            assert!(text.ends_with(reason), "{text}");
            f.delay(3);
            (0..5).for_each(|node| f.end(node, confirmed));
            f.assert_events(&[DELAYED]);
            assert!(f.is_forgotten());
        }
    }

    #[test]
    fn a_confirmed_release_is_not_late_any_more() {
        let f = Fixture::new(false);
        f.delay(0);
        f.delay(1);
        (0..3).for_each(|node| f.end(node, true));
        f.delay(3);
        f.delay(4);
        f.assert_events(&[]);
    }

    #[test]
    fn a_loss_is_reported_once_more_nodes_than_a_minority_lack_the_lease() {
        let lose = |f: &Fixture, node| {
            f.record(node, LateRelease::Lost(LossReason::Deleted));
            f.end(node, true);
        };
        let f = Fixture::new(false);
        lose(&f, 0);
        lose(&f, 1);
        f.end(2, true);
        f.assert_events(&[]);
        lose(&f, 3);
        lose(&f, 4);
        f.assert_events(&[Event::Lost]);
        assert!(f.is_forgotten());
        // A caller that gets the reply of a majority learns of the loss. Otherwise an event reports it.
        for (is_answered, events) in [(true, &[][..]), (false, &[Event::Lost, DELAYED])] {
            let f = Fixture::new(true);
            (0..3).for_each(|node| lose(&f, node));
            f.assert_events(&[]);
            f.leave(is_answered);
            lose(&f, 3);
            let told = f.events.lock().clone();
            assert_eq!(told.len(), events.len(), "{told:?}");
            assert!(events.iter().all(|event| told.contains(event)), "{told:?}");
        }
    }

    #[test]
    fn a_lasting_error_keeps_its_kind() {
        let f = Fixture::new(false);
        for node in 0..3 {
            let error = Error::new(ErrorKind::Denied, "NOPERM");
            f.record(node, LateRelease::Delayed(error));
        }
        f.assert_events(&[Event::Delayed(ErrorKind::Denied)]);
    }

    #[test]
    fn a_waiting_caller_learns_the_outcome_first() {
        let f = Fixture::new(true);
        (0..5).for_each(|node| f.delay(node));
        f.end(0, true);
        f.assert_events(&[]);
        f.leave(false);
        f.assert_events(&[DELAYED]);
        f.end(1, true);
        f.end(2, true);
        f.assert_events(&[DELAYED]);
    }

    #[test]
    fn a_release_that_ends_early_is_reported_when_its_caller_leaves() {
        let f = Fixture::new(true);
        (0..5).for_each(|node| f.end(node, true));
        f.assert_events(&[]);
        assert!(!f.is_forgotten());
        f.leave(false);
        f.assert_events(&[DELAYED]);
        assert!(f.is_forgotten());
    }

    /// Even if more nodes than a minority are late, the caller knows whether the lock was lost.
    #[test]
    fn a_caller_with_a_reply_gets_no_event() {
        let f = Fixture::new(true);
        f.end(0, true);
        f.leave(true);
        (1..5).for_each(|node| f.delay(node));
        (1..5).for_each(|node| f.end(node, false));
        f.assert_events(&[]);
        assert!(f.is_forgotten());
    }

    #[test]
    fn the_room_for_many_releases_is_freed() {
        let f = Fixture::of(1, false);
        let keys = (0..2 * ROOM_TO_KEEP).map(|n| Key::new("p:", &format!("k{n}"), 100).unwrap());
        let keys: Vec<Key> = keys.collect();
        let releases = &f.releases;
        for key in &keys {
            releases.begin(key, TOKEN, false);
        }
        let of_node = releases.of_node(0);
        f.end(0, true);
        for key in &keys {
            of_node(key, TOKEN, LateRelease::Ended { confirmed: true });
        }
        assert!(f.is_forgotten());
        assert_eq!(releases.open.lock().capacity(), 0);
    }

    #[test]
    fn a_release_beyond_the_bound_is_not_followed() {
        let f = Fixture::of(1, false);
        for token in 1..=MAX_OPEN as u64 {
            f.releases.begin(&f.key, TOKEN + token, true);
        }
        assert_eq!(f.releases.open(), MAX_OPEN);
        let error = Err(Error::new(ErrorKind::NoQuorum, ""));
        f.releases.leave(&f.key, TOKEN + MAX_OPEN as u64, &error);
        f.assert_events(&[]);
        // The same release begins again, now with a caller that waits.
        f.releases.begin(&f.key, TOKEN, true);
        f.delay(0);
        f.assert_events(&[]);
        f.leave(false);
        f.assert_events(&[DELAYED]);
    }

    proptest! {
        /// The nodes report in any order. A late release is reported once, and no entry is left.
        #[test]
        fn each_late_release_has_one_delay(
            ends in prop::collection::vec((any::<bool>(), any::<bool>()), 1..=9),
            order in Just((0..18).collect::<Vec<usize>>()).prop_shuffle(),
            left_at in prop::option::of(0..18_usize),
        ) {
            let nodes = ends.len();
            let (majority, minority) = (nodes / 2 + 1, nodes - (nodes / 2 + 1));
            let f = Fixture::of(nodes, left_at.is_some());
            // A node that ends a release without a confirmation has reported it as late before.
            let ends: Vec<(bool, bool)> = ends
                .into_iter()
                .map(|(is_late, confirmed)| (is_late || !confirmed, confirmed))
                .collect();
            let late = ends.iter().filter(|(is_late, _)| *is_late).count();
            let confirmed = ends.iter().filter(|(_, confirmed)| *confirmed).count();
            let mut has_reported = vec![false; nodes];
            for (step, event) in order.into_iter().enumerate() {
                if left_at == Some(step) {
                    f.leave(late <= minority);
                }
                let node = event % 9;
                let Some((is_late, confirmed)) = ends.get(node) else { continue };
                if std::mem::replace(&mut has_reported[node], true) {
                    f.end(node, *confirmed);
                } else if *is_late {
                    f.delay(node);
                }
            }
            let events = f.events.lock().clone();
            if late <= minority {
                prop_assert_eq!(events, vec![]);
            } else if left_at.is_some() || confirmed < majority {
                prop_assert_eq!(events, vec![DELAYED]);
            } else {
                // The caller may have the replies of a majority before more nodes than a minority are late.
                prop_assert!(events.is_empty() || events == [DELAYED]);
            }
            prop_assert!(f.is_forgotten());
        }
    }
}
