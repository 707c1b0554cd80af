//! Requests in a pipeline, and what the pipeline does with a request after its reply or if no reply comes.

use std::sync::Arc;
use std::time::Duration;

use crate::command::{Command, IfUnanswered, Outcome, Release, Reply};
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::store::Reports;
use crate::store::completion::{Caller, Completion};
use crate::store::late_release::ReleaseTracker;
use crate::util::clock::MonotonicTime;
use crate::util::slot::Redirect;
use crate::wire::pipeline::confirmed::ConfirmedRelease;
use crate::wire::pipeline::releases::{QueuedRelease, Route};

/// Half of the pause after the first failed attempt. The pause doubles with each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// After this many doublings, the pause is [`LONGEST_PAUSE`].
pub const MOST_DOUBLINGS: u32 = 6;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A release pauses after this many nodes have redirected it one after another.
const MOST_HOPS: u8 = 4;

/// A command in a pipeline, until its outcome is final.
pub struct PendingRequest {
    pub command: Command,
    /// `None` if no caller waits for the outcome.
    pub completion: Option<Completion>,
    /// The number of failed attempts.
    pub attempts: u32,
    /// Whether this is an undo: the release of a lease whose key a late request may still set. It is repeated until it
    /// finds the lease, or until the lease's ttl has ended.
    is_undo: bool,
    /// Whether plain commands may have set the key of this acquire without a usable token.
    pub may_be_set: bool,
    pub route: Route,
    /// Reports a guard's release that is late.
    tracker: Option<Box<ReleaseTracker>>,
}

/// The next step for a request after a reply or a failure.
pub enum Next {
    Done,
    /// The server has confirmed this release.
    Released(ConfirmedRelease),
    /// Write this request as soon as there is a connection.
    RetryNow(PendingRequest),
    /// Write this release after a pause: Redis has refused it, or the acquire that it undoes may arrive later.
    RetryLater(PendingRequest),
    /// Pass this release to the store, which queues it at another node of the Cluster.
    Elsewhere(PendingRequest, Redirect),
}

impl PendingRequest {
    pub fn new(command: Command, completion: Option<Completion>) -> Self {
        Self {
            command,
            completion,
            attempts: 0,
            is_undo: false,
            may_be_set: false,
            route: Route::default(),
            tracker: None,
        }
    }

    /// Makes this request report a guard's release if it is late.
    pub fn with_tracker(mut self, reports: &Reports) -> Self {
        let release = self.command.as_release();
        let tracker = release.and_then(|it| ReleaseTracker::new(reports, it, false));
        self.tracker = tracker.map(Box::new);
        self
    }

    /// Makes this release an undo: it is repeated until it finds the lease, or until the lease's ttl has ended.
    pub fn into_undo(mut self) -> Self {
        self.is_undo = true;
        self
    }

    /// Whether a caller waits for the outcome.
    pub fn is_waited_for(&self) -> bool {
        let completion = self.completion.as_ref();
        completion.is_some_and(Completion::is_waited_for)
    }

    /// Whether to write the request, because a caller waits for it or it is a release whose ttl has not ended.
    pub fn is_wanted(&self) -> bool {
        let waited_for = self.is_waited_for();
        match self.command {
            // A release is written at least once, even after the ttl: the ttl in Redis may be longer than this client
            // knows.
            Command::Release(Release { until, .. }) => {
                waited_for || self.attempts == 0 || MonotonicTime::now() < until
            }
            _ => waited_for,
        }
    }

    /// The pause before the next attempt.
    pub fn pause(&self) -> Duration {
        let factor = 1 << self.attempts.min(MOST_DOUBLINGS);
        (FIRST_PAUSE * factor).min(LONGEST_PAUSE)
    }

    /// Converts this request to a queued release. `None` for other commands. `due` is the time at which to write a
    /// repeat.
    pub fn into_release(self, due: Option<MonotonicTime>) -> Option<QueuedRelease> {
        let Command::Release(release) = self.command else {
            return None;
        };
        let until = release.until;
        Some(QueuedRelease {
            release,
            due: due.map_or(until, |due| due.min(until)),
            attempts: self.attempts,
            is_undo: self.is_undo,
            route: self.route,
            reported_late: self.tracker.is_some_and(|tracker| tracker.suspend()),
        })
    }

    /// Converts a queued release to a request with a tracker.
    pub fn from_release(queued: QueuedRelease, reports: &Reports) -> Self {
        let tracker = ReleaseTracker::new(reports, &queued.release, queued.reported_late);
        Self {
            command: Command::Release(queued.release),
            completion: None,
            attempts: queued.attempts,
            is_undo: queued.is_undo,
            may_be_set: false,
            route: queued.route,
            tracker: tracker.map(Box::new),
        }
    }

    pub fn is_flush(&self) -> bool {
        matches!(self.command, Command::Flush)
    }

    /// Whether this request is not written: it ends when the replies to earlier requests have come.
    pub fn is_barrier(&self) -> bool {
        matches!(self.command, Command::Flush | Command::Settle(_))
    }

    /// Handles the reply of Redis.
    pub fn on_reply(mut self, outcome: Outcome) -> Next {
        let outcome = match outcome {
            Ok(reply) if self.attempts > 0 && !self.is_undo => {
                Ok(self.command.reply_to_repeat(reply))
            }
            Err(error) if self.attempts > 0 && self.command.ends_lease() => Err(error.of_repeat()),
            outcome => outcome,
        };
        if let (Command::Release(_), Err(error)) = (&self.command, &outcome)
            && let Some(redirect) = error.redirect()
        {
            let redirect = redirect.clone();
            return self.on_redirect(outcome, redirect);
        }
        match (&self.command, &outcome) {
            (Command::Release(Release { until, .. }), Err(_)) if MonotonicTime::now() < *until => {
                self.deliver(outcome);
                self.attempts += 1;
                Next::RetryLater(self)
            }
            (
                Command::Release(Release { until, .. }),
                Ok(Reply::Missing | Reply::Taken { .. } | Reply::Abstained { .. }),
            ) if self.is_undo && MonotonicTime::now() < *until => {
                self.attempts += 1;
                Next::RetryLater(self)
            }
            // Plain commands have set the key, and Redis has refused the script that has to delete it.
            (Command::Acquire(_), Err(error)) if self.may_be_set => {
                // A redirected acquire would keep its lease id, and the release below would end its grant.
                let error = match error.redirect() {
                    Some(Redirect::Moved(_) | Redirect::Ask(_)) => slot_moved(),
                    _ => error.clone().with_redirect(None),
                };
                self.deliver(Err(error));
                self.release_now()
            }
            (
                Command::Acquire(_) | Command::Adopt(_) | Command::Convert(_) | Command::Claim(_),
                Ok(
                    Reply::Granted { .. }
                    | Reply::Adopted { .. }
                    | Reply::Contended {
                        queued: Some(_), ..
                    },
                ),
            ) => {
                if self.deliver(outcome) {
                    return Next::Done;
                }
                // The caller has left, but Redis has granted it the key or has queued it.
                self.release_now()
            }
            _ => self.end_with(outcome),
        }
    }

    /// Delivers the final outcome of the request. If Redis has confirmed a release, reports its end, and a loss that
    /// the reply shows.
    fn end_with(mut self, outcome: Outcome) -> Next {
        let loss = match (&self.tracker, &outcome) {
            (Some(_), Ok(reply)) => {
                let release = self.command.as_release();
                release.and_then(|release| release.loss(reply, MonotonicTime::now()))
            }
            _ => None,
        };
        let is_done = outcome.is_ok();
        let is_delivered = self.deliver(outcome);
        if !is_done {
            return Next::Done;
        }
        if let Some(tracker) = self.tracker.take() {
            tracker.confirm(loss, is_delivered);
        }
        match self.command {
            // Only usual releases are repeated on the next connection. If a fail-over loses another release, its key
            // expires with the ttl.
            Command::Release(release) if release.is_usual() => {
                Next::Released(ConfirmedRelease::new(release))
            }
            _ => Next::Done,
        }
    }

    /// Makes a release of the lease for which this acquire, adoption or conversion has got a grant or a place in the
    /// queue.
    fn release_now(self) -> Next {
        let undo = self.command.undo(MonotonicTime::now());
        undo.map_or(Next::Done, |undo| {
            let mut undo = Self::new(Command::Release(undo), None);
            undo.route = self.route;
            Next::RetryNow(undo)
        })
    }

    /// Handles a redirect: a node of a Cluster has refused the release and has done nothing. If a caller waits, the
    /// caller follows the redirect.
    fn on_redirect(mut self, outcome: Outcome, redirect: Redirect) -> Next {
        if let Some(completion) = self.completion.take() {
            if completion.complete(outcome).is_ok() {
                // The caller now sends the release again.
                if let Some(tracker) = self.tracker.take() {
                    tracker.suspend();
                }
                return Next::Done;
            }
            self.report_late(&caller_left());
        }
        let may_hop = self.route.hops < MOST_HOPS;
        if may_hop && matches!(redirect, Redirect::Moved(_) | Redirect::Ask(_)) {
            self.route.hops += 1;
            return Next::Elsewhere(self, redirect);
        }
        // The nodes disagree about the slot, the slot is moving, or the slot has no master.
        self.route = Route::default();
        self.attempts += 1;
        match &self.command {
            Command::Release(Release { until, .. }) if MonotonicTime::now() < *until => {
                Next::RetryLater(self)
            }
            _ => Next::Done,
        }
    }

    /// Reports the release as late.
    pub fn report_late(&mut self, error: &Error) {
        if let Some(tracker) = &mut self.tracker {
            tracker.report_late(error);
        }
    }

    /// Handles the loss of the connection after the request was written and before its reply. With `may_retry`, a
    /// release is repeated at once on another connection.
    pub fn on_connection_lost(mut self, error: &Error, may_retry: bool) -> Next {
        let may_retry = may_retry && self.attempts == 0;
        self.attempts += 1;
        match self.command.if_unanswered(MonotonicTime::now()) {
            IfUnanswered::Undo(release) => {
                self.deliver(Err(error.clone()));
                let mut undo = Self::new(Command::Release(release), None).into_undo();
                undo.route = self.route;
                Next::RetryNow(undo)
            }
            IfUnanswered::Repeat if may_retry && self.is_wanted() => Next::RetryNow(self),
            IfUnanswered::Repeat | IfUnanswered::Report => self.on_not_sent(error),
        }
    }

    /// Handles an error after which the server may have carried the request out. The connection works, so a release is
    /// repeated only after a pause.
    pub fn on_unknown(self, error: &Error) -> Next {
        match self.command {
            Command::Release(_) => self.on_reply(Err(error.clone())),
            _ => self.on_connection_lost(error, false),
        }
    }

    /// Completes an unwritten request with the error. A release is kept, and repeated.
    pub fn on_not_sent(mut self, error: &Error) -> Next {
        self.deliver(Err(error.clone()));
        self.attempts += 1;
        match self.command {
            Command::Release(Release { until, .. }) if MonotonicTime::now() < until => {
                Next::RetryNow(self)
            }
            _ => Next::Done,
        }
    }

    /// Passes the outcome to the caller. Returns false if no caller waits. Reports a release as late if it failed or
    /// its caller has left.
    fn deliver(&mut self, outcome: Outcome) -> bool {
        let failed = match &self.tracker {
            Some(_) => outcome.as_ref().err().cloned(),
            None => None,
        };
        let completed = self
            .completion
            .take()
            .map(|completion| completion.complete(outcome));
        if let Some(tracker) = &mut self.tracker {
            let late = failed.or_else(|| matches!(completed, Some(Err(_))).then(caller_left));
            if let Some(error) = late {
                tracker.report_late(&error);
            }
        }
        matches!(completed, Some(Ok(())))
    }
}

/// The reason why a release is late if its caller has left at the deadline.
pub fn caller_left() -> Error {
    let message = "the release had no reply at its caller's deadline; the client tries on";
    Error::new(ErrorKind::Timeout, message)
}

/// The reason why an acquire is not redirected: it may hold the key at the node that redirects it.
fn slot_moved() -> Error {
    let message = "the Cluster has moved the key's slot during the acquire; try again";
    Error::new(ErrorKind::Unavailable, message)
}

/// The first caller that waits for one of these requests and can lead the pipeline.
pub fn next_leader<'a>(
    requests: impl Iterator<Item = &'a PendingRequest>,
) -> Option<&'a Arc<Caller>> {
    let mut completions = requests.filter_map(|request| request.completion.as_ref());
    completions.find_map(Completion::next_leader)
}

/// The keys of those releases, among these requests, that may pass the lock to another client.
pub fn keys_for_next_waiters<'a>(
    requests: impl Iterator<Item = &'a PendingRequest>,
) -> impl Iterator<Item = &'a Key> {
    requests.filter_map(|request| request.command.as_release()?.key_for_next_waiter())
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::command::{Acquire, Mode};
    use crate::store::completion::WaitEnd;
    use crate::util::id::LeaseId;
    use crate::wire::net::error_replies::error_reply;

    fn release() -> Command {
        Command::Release(Release::unheld(
            Key::new("p:", "k", 16).unwrap(),
            LeaseId::random(),
            MonotonicTime::now().after(Duration::from_secs(60)),
        ))
    }

    fn refusal(code: &str) -> Outcome {
        Err(error_reply(code, Some("7 host:1")))
    }

    #[test]
    fn a_release_is_passed_on_four_times() {
        let mut request = PendingRequest::new(release(), None);
        for hop in 1..=MOST_HOPS {
            let code = if hop % 2 == 0 { "ASK" } else { "MOVED" };
            let Next::Elsewhere(passed, _) = request.on_reply(refusal(code)) else {
                panic!("hop {hop}");
            };
            request = passed;
            assert_eq!((request.route.hops, request.attempts), (hop, 0));
        }
        let Next::RetryLater(request) = request.on_reply(refusal("MOVED")) else {
            panic!("the release goes on without a pause");
        };
        // After the pause, nodes may again redirect the release four times.
        assert_eq!((request.route, request.attempts), (Route::default(), 1));
    }

    #[test]
    fn a_release_stays_while_its_slot_moves() {
        for code in ["TRYAGAIN", "CLUSTERDOWN"] {
            let request = PendingRequest::new(release(), None);
            assert!(
                matches!(request.on_reply(refusal(code)), Next::RetryLater(_)),
                "{code}"
            );
        }
    }

    /// The caller then knows that a missing lease is no loss.
    #[test]
    fn a_refused_repeat_is_marked() {
        let refuse = |is_repeat| {
            let caller = Caller::new(1);
            let mut request = PendingRequest::new(release(), Some(Completion::new(&caller, 0)));
            if is_repeat {
                let broken = Error::new(ErrorKind::Unavailable, "the connection broke");
                let Next::RetryNow(repeat) = request.on_connection_lost(&broken, true) else {
                    panic!("the release is not repeated");
                };
                request = repeat;
            }
            assert!(matches!(request.on_reply(refusal("MOVED")), Next::Done));
            let outcome = caller.take_outcomes().next();
            outcome.unwrap().unwrap_err().is_of_repeat()
        };
        assert_eq!([false, true].map(refuse), [false, true]);
    }

    #[test]
    fn a_waiting_caller_gets_its_release_back() {
        let caller = Caller::new(1);
        let request = PendingRequest::new(release(), Some(Completion::new(&caller, 0)));
        assert!(matches!(request.on_reply(refusal("MOVED")), Next::Done));
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        assert_eq!(caller.wait(far), WaitEnd::Complete);
        let error = caller.take_outcomes().next().unwrap().unwrap_err();
        assert!(matches!(error.redirect(), Some(Redirect::Moved(_))));
        // The caller has left, so the pipeline passes the release to the other node.
        let caller = Caller::new(1);
        let request = PendingRequest::new(release(), Some(Completion::new(&caller, 0)));
        caller.leave();
        assert!(matches!(
            request.on_reply(refusal("MOVED")),
            Next::Elsewhere(..)
        ));
    }

    #[test]
    fn a_redirected_acquire_leaves_nothing_to_undo() {
        let acquire = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: Key::new("p:", "k", 16).unwrap(),
            lease: LeaseId::random(),
            ttl: Duration::from_secs(60),
            queue_mode: crate::command::QueueMode::Notified,
            link: crate::command::Link::Alone,
            replicas: None,
        });
        let caller = Caller::new(1);
        let request = PendingRequest::new(acquire, Some(Completion::new(&caller, 0)));
        caller.leave();
        assert!(matches!(request.on_reply(refusal("ASK")), Next::Done));
    }
}
