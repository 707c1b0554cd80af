//! What the features `tracing` and `metrics` tell, under the names of docs/observability.md. Without them
//! nothing is left of it. Decides nothing; what it calls is user code, so it is called on a caller's thread or
//! on the callbacks's only, and a panic in it stays here.

#![cfg_attr(
    not(all(feature = "metrics", feature = "tracing")),
    allow(unused_imports, unused_variables, dead_code)
)]

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

#[cfg(feature = "tracing")]
use tracing::{Span, field::Empty, span::Entered};

use crate::error::{Error, ErrorKind};
use crate::event::{EventHandler, EventLock};
use crate::loss::LossReason;
use crate::util::text::printable;

/// Whether there is anything to tell. Where it is not, what leads there is compiled away.
pub(crate) const IS_ON: bool = cfg!(any(feature = "metrics", feature = "tracing"));

/// A panic in what is told stays here.
fn catch_panics(tell: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(tell));
}

#[cfg(feature = "tracing")]
fn span(make: impl FnOnce() -> Span) -> Span {
    catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|_| Span::none())
}

/// Each by itself: a panic of the one during that of the other would end the process.
#[cfg(feature = "tracing")]
fn end(span: Span, say: impl FnOnce(&Span)) {
    catch_panics(|| say(&span));
    catch_panics(|| drop(span));
}

/// The name of a lock, made printable for spans and events: a program may let its users choose it.
#[cfg(feature = "tracing")]
fn named(key: &str) -> Cow<'_, str> {
    printable(key, 1024)
}

/// A call that wants a lock, from its begin to its end.
pub(crate) struct Wait {
    #[cfg(feature = "tracing")]
    span: Span,
}

impl Wait {
    pub(crate) fn begin(key: &str) -> Self {
        Self {
            #[cfg(feature = "tracing")]
            span: span(|| {
                tracing::debug_span!(
                    target: "leasehold",
                    "leasehold.wait",
                    key = &*named(key),
                    token = Empty,
                    outcome = Empty,
                )
            }),
        }
    }

    /// It ended with a grant, without one, or with an error.
    pub(crate) fn ended(self, granted: Result<Option<EventLock<'_>>, &Error>, waited: Duration) {
        let outcome = match granted {
            Ok(Some(_)) => "granted",
            Ok(None) => "contended",
            Err(error) => name_of(error.kind()),
        };
        #[cfg(feature = "tracing")]
        end(self.span, |span| {
            if let Ok(Some(lock)) = granted {
                span.record("token", lock.fencing_token);
            }
            span.record("outcome", outcome);
        });
        #[cfg(feature = "metrics")]
        catch_panics(|| {
            metrics::counter!("leasehold_waits_total", "outcome" => outcome).increment(1);
            metrics::histogram!("leasehold_wait_seconds").record(waited);
        });
    }
}

/// A guard, from the grant to its end.
pub(crate) struct Hold {
    #[cfg(feature = "tracing")]
    span: Span,
}

impl Hold {
    pub(crate) fn begin(lock: EventLock<'_>) -> Self {
        Self {
            #[cfg(feature = "tracing")]
            span: span(|| {
                tracing::debug_span!(
                    target: "leasehold",
                    "leasehold.hold",
                    key = &*named(lock.key),
                    token = lock.fencing_token,
                    outcome = Empty,
                )
            }),
        }
    }

    /// Runs what is done under the lock; what that tells belongs to the span.
    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        #[cfg(feature = "tracing")]
        let _scope = Scope::of(&self.span);
        work()
    }

    pub(crate) fn ended(&mut self, outcome: &'static str, held: Duration) {
        #[cfg(feature = "tracing")]
        end(std::mem::replace(&mut self.span, Span::none()), |span| {
            span.record("outcome", outcome);
        });
        #[cfg(feature = "metrics")]
        catch_panics(|| {
            metrics::counter!("leasehold_holds_total", "outcome" => outcome).increment(1);
            metrics::histogram!("leasehold_hold_seconds").record(held);
        });
    }

    /// In a forked child nothing is told: what would hear it is the parent's.
    pub(crate) fn forget(&mut self) {
        #[cfg(feature = "tracing")]
        std::mem::forget(std::mem::replace(&mut self.span, Span::none()));
    }
}

/// From the begin of some work in a span to its end.
#[cfg(feature = "tracing")]
struct Scope<'a>(Option<Entered<'a>>);

#[cfg(feature = "tracing")]
impl<'a> Scope<'a> {
    fn of(span: &'a Span) -> Self {
        Self(catch_unwind(AssertUnwindSafe(|| span.enter())).ok())
    }
}

#[cfg(feature = "tracing")]
impl Drop for Scope<'_> {
    fn drop(&mut self) {
        catch_panics(|| drop(self.0.take()));
    }
}

/// A lock passed to the next thread of its client.
pub(crate) fn handed_off() {
    #[cfg(feature = "metrics")]
    catch_panics(|| metrics::counter!("leasehold_hand_offs_total").increment(1));
}

/// A renewal that was answered.
#[cfg(feature = "metrics")]
struct Answered {
    outcome: &'static str,
    /// From when it was due until it was asked for.
    late: Duration,
    /// From when it was due until its answer.
    answered: Duration,
}

/// Renewals that were answered together, to be told together.
#[derive(Default)]
pub(crate) struct Renewals {
    #[cfg(feature = "metrics")]
    answered: Vec<Answered>,
}

impl Renewals {
    /// One more, which had been due for so long when it was asked for, and was answered within `took`.
    pub(crate) fn add(&mut self, outcome: &Result<(), Error>, late: Duration, took: Duration) {
        #[cfg(feature = "metrics")]
        {
            let outcome = match outcome {
                Ok(()) => "renewed",
                Err(error) if error.is_lease_lost() => "lost",
                Err(_) => "failed",
            };
            self.answered.push(Answered {
                outcome,
                late,
                answered: late + took,
            });
        }
    }

    pub(crate) fn tell(self) {
        #[cfg(feature = "metrics")]
        for renewal in self.answered {
            let outcome = renewal.outcome;
            catch_panics(|| {
                metrics::counter!("leasehold_renewals_total", "outcome" => outcome).increment(1);
                metrics::histogram!("leasehold_renewal_lateness_seconds").record(renewal.late);
                metrics::histogram!("leasehold_renewal_seconds").record(renewal.answered);
            });
        }
    }
}

/// Hears of some events before the client's own [`EventHandler`] do.
pub(crate) struct Observer;

impl EventHandler for Observer {
    fn renewal_failed(&self, lock: EventLock<'_>, error: &Error) {
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            tracing::warn!(
                target: "leasehold", key = &*named(lock.key), token = lock.fencing_token, %error,
                "renewal failed"
            );
        });
    }

    fn lost(&self, lock: EventLock<'_>, reason: &LossReason) {
        #[cfg(feature = "metrics")]
        catch_panics(|| {
            let reason = name_of_loss(reason);
            metrics::counter!("leasehold_losses_total", "reason" => reason).increment(1);
        });
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            tracing::warn!(
                target: "leasehold", key = &*named(lock.key), token = lock.fencing_token, %reason,
                "lock lost"
            );
        });
    }

    fn events_missed(&self, count: u64) {
        #[cfg(feature = "metrics")]
        catch_panics(|| metrics::counter!("leasehold_events_missed_total").increment(count));
        #[cfg(feature = "tracing")]
        catch_panics(|| tracing::warn!(target: "leasehold", count, "events missed"));
    }

    fn release_delayed(&self, lock: EventLock<'_>, error: &Error) {
        #[cfg(feature = "metrics")]
        catch_panics(|| metrics::counter!("leasehold_releases_delayed_total").increment(1));
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            tracing::warn!(
                target: "leasehold", key = &*named(lock.key), token = lock.fencing_token, %error,
                "release delayed"
            );
        });
    }
}

/// How many releases, that could not be done yet, each pipeline owes.
pub(crate) fn retries(of_lanes: &[usize]) {
    #[cfg(feature = "metrics")]
    for (pipeline, count) in of_lanes.iter().enumerate() {
        catch_panics(|| {
            metrics::gauge!("leasehold_release_retries", "pipeline" => pipeline.to_string())
                .set(*count as f64);
        });
    }
}

/// Says what the metrics mean, to a recorder that wants to know.
pub(crate) fn describe() {
    #[cfg(feature = "metrics")]
    catch_panics(|| {
        use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
        let counters = [
            (
                "leasehold_waits_total",
                "Calls that wanted a lock, by outcome",
            ),
            (
                "leasehold_holds_total",
                "Guards that have ended, by outcome",
            ),
            (
                "leasehold_hand_offs_total",
                "Locks passed on within a client",
            ),
            (
                "leasehold_renewals_total",
                "Renewals of held locks, by outcome",
            ),
            ("leasehold_losses_total", "Locks lost while held, by reason"),
            (
                "leasehold_releases_delayed_total",
                "Releases not done at once",
            ),
            (
                "leasehold_events_missed_total",
                "EventHandler for which callbacks were too slow",
            ),
        ];
        for (name, what) in counters {
            describe_counter!(name, Unit::Count, what);
        }
        let histograms = [
            ("leasehold_wait_seconds", "How long calls waited for a lock"),
            ("leasehold_hold_seconds", "How long guards held a lock"),
            (
                "leasehold_renewal_lateness_seconds",
                "How late renewals were asked for",
            ),
            (
                "leasehold_renewal_seconds",
                "From when renewals were due until their answer",
            ),
        ];
        for (name, what) in histograms {
            describe_histogram!(name, Unit::Seconds, what);
        }
        describe_gauge!(
            "leasehold_release_retries",
            Unit::Count,
            "Releases that a pipeline owes"
        );
    });
}

/// The name of an error's kind, as a value of a label.
fn name_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Denied => "denied",
        ErrorKind::Cancelled => "cancelled",
        ErrorKind::Shutdown => "shutdown",
        ErrorKind::Protocol => "protocol",
        _ => "other",
    }
}

#[cfg(feature = "metrics")]
fn name_of_loss(reason: &LossReason) -> &'static str {
    match reason {
        LossReason::Expired => "expired",
        LossReason::TakenOver { .. } => "taken_over",
        LossReason::Deleted => "deleted",
        LossReason::ForceUnlocked { .. } => "force_unlocked",
        LossReason::MaxHold => "max_hold",
        LossReason::NotRenewed => "not_renewed",
        LossReason::ThreadEnded => "thread_ended",
        LossReason::Shutdown => "shutdown",
        LossReason::Forked => "forked",
    }
}
