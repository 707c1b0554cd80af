//! Spans, events and metrics for the features `tracing` and `metrics`. docs/observability.md lists their names. Without
//! these features, the functions here have no effect.
//!
//! Subscribers and recorders are user code. They run only on callers' threads and on the callback thread, and this
//! module catches their panics.

#![cfg_attr(
    not(all(feature = "metrics", feature = "tracing")),
    allow(unused_imports, unused_variables, dead_code)
)]

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[cfg(feature = "tracing")]
use tracing::{Span, field::Empty, span::Entered};

use crate::report::environment::EnvironmentFinding;
use crate::report::error::{Error, ErrorKind};
use crate::report::event::{EventHandler, EventLock};
use crate::report::loss::LossReason;
#[cfg(feature = "tracing")]
use crate::report::node_state::NodeHealth;
use crate::report::node_state::NodeState;
use crate::util::text::printable;

/// Whether one of the features is on. If none is, the compiler removes the code that depends on this constant.
pub(crate) const IS_ON: bool = cfg!(any(feature = "metrics", feature = "tracing"));

/// Calls a subscriber or recorder, and drops its panic.
fn catch_panics(call: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(call));
}

/// Makes a span; `Span::none()` if the subscriber panics.
#[cfg(feature = "tracing")]
fn span(make: impl FnOnce() -> Span) -> Span {
    catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|_| Span::none())
}

/// Records values in a span, then closes the span. Catches the panics of both steps separately: a second panic during
/// the unwinding of the first would end the process.
#[cfg(feature = "tracing")]
fn end(span: Span, record: impl FnOnce(&Span)) {
    catch_panics(|| record(&span));
    catch_panics(|| drop(span));
}

/// The name of a lock, printable on one line: users of the program may choose names.
#[cfg(feature = "tracing")]
fn named(key: &str) -> Cow<'_, str> {
    printable(key, 1024)
}

/// The span and metrics of a call that waits for a lock.
pub(crate) struct WaitSpan {
    #[cfg(feature = "tracing")]
    span: Span,
}

impl WaitSpan {
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

    /// Records that the call ended: with a grant, without a grant, or with an error.
    pub(crate) fn ended(self, granted: Result<Option<EventLock<'_>>, &Error>, waited: Duration) {
        let outcome = match granted {
            Ok(Some(_)) => "granted",
            Ok(None) => "contended",
            Err(error) => name_of(error.kind()),
        };
        #[cfg(feature = "tracing")]
        end(self.span, |span| {
            if let Ok(Some(lock)) = granted {
                span.record("token", tracing::field::display(lock.fencing_token));
            }
            span.record("outcome", outcome);
        });
        #[cfg(feature = "metrics")]
        catch_panics(|| {
            register_at_new_recorder();
            metrics::counter!("leasehold_waits_total", "outcome" => outcome).increment(1);
            metrics::histogram!("leasehold_wait_seconds").record(waited);
        });
    }
}

/// The span and metrics of a guard.
pub(crate) struct HoldSpan {
    #[cfg(feature = "tracing")]
    span: Span,
}

impl HoldSpan {
    pub(crate) fn begin(lock: EventLock<'_>) -> Self {
        Self {
            #[cfg(feature = "tracing")]
            span: span(|| {
                tracing::debug_span!(
                    target: "leasehold",
                    "leasehold.hold",
                    key = &*named(lock.key),
                    token = %lock.fencing_token,
                    outcome = Empty,
                )
            }),
        }
    }

    pub(crate) fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        #[cfg(feature = "tracing")]
        let _scope = Scope::of(&self.span);
        work()
    }

    /// Records that the guard ended.
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

    /// Leaks the span in a forked child, whose subscriber is a copy of the parent's.
    pub(crate) fn forget(&mut self) {
        #[cfg(feature = "tracing")]
        std::mem::forget(std::mem::replace(&mut self.span, Span::none()));
    }
}

/// Enters a span. Its drop exits the span.
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

pub(crate) fn count_hand_off() {
    #[cfg(feature = "metrics")]
    catch_panics(|| metrics::counter!("leasehold_hand_offs_total").increment(1));
}

/// The metrics of one renewal that Redis answered.
#[cfg(feature = "metrics")]
struct RenewalReply {
    outcome: &'static str,
    /// How late the request was, counted from the time at which the renewal was due.
    late: Duration,
    /// How late the reply was, counted from the time at which the renewal was due.
    answered: Duration,
}

/// The metrics of renewals whose replies came together.
#[derive(Default)]
pub(crate) struct RenewalMetrics {
    #[cfg(feature = "metrics")]
    answered: Vec<RenewalReply>,
}

impl RenewalMetrics {
    /// Adds a renewal. Its request was sent `late` after the renewal was due, and its reply took `took`.
    pub(crate) fn add(&mut self, outcome: &Result<(), Error>, late: Duration, took: Duration) {
        #[cfg(feature = "metrics")]
        {
            let outcome = match outcome {
                Ok(()) => "renewed",
                Err(error) if error.is_lease_lost() => "lost",
                Err(_) => "failed",
            };
            self.answered.push(RenewalReply {
                outcome,
                late,
                answered: late + took,
            });
        }
    }

    pub(crate) fn record(self) {
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

/// The event handler that records tracing events and metrics. It is called before the client's own event handler.
pub(crate) struct Observer;

impl EventHandler for Observer {
    fn renewal_failed(&self, lock: EventLock<'_>, error: &Error) {
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            tracing::warn!(
                target: "leasehold", key = &*named(lock.key), token = %lock.fencing_token, %error,
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
                target: "leasehold", key = &*named(lock.key), token = %lock.fencing_token, %reason,
                "lock lost"
            );
        });
    }

    fn write_refused(&self, value: EventLock<'_>, last_token: u64) {
        #[cfg(feature = "metrics")]
        catch_panics(|| metrics::counter!("leasehold_writes_refused_total").increment(1));
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            tracing::warn!(
                target: "leasehold", key = &*named(value.key), token = %value.fencing_token, %last_token,
                "write refused"
            );
        });
    }

    fn foreign_holder(&self, lock: EventLock<'_>, redis_type: &str, expires_in: Option<Duration>) {
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            tracing::warn!(
                target: "leasehold", key = &*named(lock.key), redis_type, ?expires_in, "foreign holder"
            );
        });
    }

    fn environment_warning(&self, finding: &EnvironmentFinding) {
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            tracing::warn!(
                target: "leasehold",
                server = finding.server(),
                warning = %finding.warning(),
                "environment warning"
            );
        });
    }

    fn sentinels_unavailable(&self, error: &Error) {
        #[cfg(feature = "tracing")]
        catch_panics(|| tracing::warn!(target: "leasehold", %error, "sentinels unavailable"));
    }

    fn plain_acquires_refused(&self, error: &Error) {
        #[cfg(feature = "tracing")]
        catch_panics(|| tracing::warn!(target: "leasehold", %error, "plain acquires refused"));
    }

    fn node_changed(&self, node: &NodeState) {
        #[cfg(feature = "metrics")]
        catch_panics(|| {
            let gauge = metrics::gauge!("leasehold_node_up", "node" => node.address().to_owned());
            gauge.set(f64::from(u8::from(node.is_up())));
        });
        #[cfg(feature = "tracing")]
        catch_panics(|| {
            let (node, health, clock) = (node.address(), node.health(), node.clock());
            match health {
                NodeHealth::Up => match clock {
                    Some(clock) if !clock.is_within_bound() => tracing::warn!(
                        target: "leasehold", node, ahead_micros = clock.offset_micros(),
                        "node's clock differs from the others"
                    ),
                    _ => tracing::info!(target: "leasehold", node, "node up"),
                },
                health => tracing::warn!(target: "leasehold", node, %health, "node does not vote"),
            }
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
                target: "leasehold", key = &*named(lock.key), token = %lock.fencing_token, %error,
                "release delayed"
            );
        });
    }
}

/// The number of failed releases that the pipelines of a client will retry. A client that has ended retries none.
#[derive(Default)]
pub(crate) struct Retries(AtomicUsize);

/// The sum of the [`Retries`] of all clients of this process.
static ALL_RETRIES: AtomicUsize = AtomicUsize::new(0);

impl Retries {
    fn set(&self, count: usize) {
        let before = self.0.swap(count, Ordering::SeqCst);
        // The sum wraps around if `count` is smaller than `before`, and is right again after the addition.
        ALL_RETRIES.fetch_add(count.wrapping_sub(before), Ordering::SeqCst);
    }

    /// Sets the number of this client, and records the sum of all clients.
    pub fn record(&self, count: usize) {
        self.set(count);
        #[cfg(feature = "metrics")]
        catch_panics(|| {
            let gauge = metrics::gauge!("leasehold_release_retries");
            let mut recorded = None;
            // Another client may change the sum at the same time.
            while recorded != Some(ALL_RETRIES.load(Ordering::SeqCst)) {
                let sum = ALL_RETRIES.load(Ordering::SeqCst);
                gauge.set(sum as f64);
                recorded = Some(sum);
            }
        });
    }
}

impl Drop for Retries {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// Records how far the clock of a quorum's node differs from those of the others.
#[cfg_attr(not(feature = "metrics"), expect(unused_variables))]
pub(crate) fn record_clock(node: &NodeState) {
    #[cfg(feature = "metrics")]
    catch_panics(|| {
        let label = node.address().to_owned();
        if let Some(clock) = node.clock() {
            let gauge = metrics::gauge!("leasehold_node_clock_offset_seconds", "node" => label);
            gauge.set(clock.offset_micros() as f64 / 1e6);
        }
    });
}

/// A counter: its name, its description, and its label with all values, if it has one.
#[cfg(feature = "metrics")]
type CounterSeries = (
    &'static str,
    &'static str,
    Option<(&'static str, &'static [&'static str])>,
);

/// All counters. Each of their series is registered with the value zero, since `increase()` of Prometheus misses the
/// event with which a series begins.
#[cfg(feature = "metrics")]
const COUNTERS: [CounterSeries; 8] = [
    (
        "leasehold_waits_total",
        "Calls that asked for a lock, by outcome",
        Some((
            "outcome",
            &[
                "granted",
                "contended",
                "unavailable",
                "no_quorum",
                "timeout",
                "denied",
                "tls",
                "cancelled",
                "shutdown",
                "protocol",
                "other",
            ],
        )),
    ),
    (
        "leasehold_holds_total",
        "Guards that have ended, by outcome",
        Some((
            "outcome",
            &[
                "released",
                "unconfirmed",
                "dropped",
                "handed_off",
                "converted",
                "shared",
                "transferred",
                "lost",
            ],
        )),
    ),
    (
        "leasehold_hand_offs_total",
        "Locks handed off within a client",
        None,
    ),
    (
        "leasehold_renewals_total",
        "Renewals of held locks, by outcome",
        Some(("outcome", &["renewed", "failed", "lost"])),
    ),
    (
        "leasehold_losses_total",
        "Locks lost while held, by reason",
        Some((
            "reason",
            &[
                "expired",
                "taken_over",
                "deleted",
                "force_unlocked",
                "max_hold",
                "not_renewed",
                "thread_ended",
                "shutdown",
            ],
        )),
    ),
    (
        "leasehold_writes_refused_total",
        "Writes of fenced values refused because a later holder has written",
        None,
    ),
    (
        "leasehold_releases_delayed_total",
        "Releases that failed at first and are retried",
        None,
    ),
    (
        "leasehold_events_missed_total",
        "Events dropped because the queue of the callback thread was full",
        None,
    ),
];

#[cfg(feature = "metrics")]
const HISTOGRAMS: [(&str, &str); 4] = [
    ("leasehold_wait_seconds", "How long calls waited for a lock"),
    ("leasehold_hold_seconds", "How long guards held a lock"),
    (
        "leasehold_renewal_lateness_seconds",
        "How late renewals were sent",
    ),
    (
        "leasehold_renewal_seconds",
        "From when renewals were due until their answer",
    ),
];

/// The address of the recorder that has all series.
#[cfg(feature = "metrics")]
static REGISTERED_AT: AtomicUsize = AtomicUsize::new(0);

#[cfg(feature = "metrics")]
fn recorder_address() -> usize {
    metrics::with_recorder(|recorder| std::ptr::from_ref(recorder).cast::<()>() as usize)
}

/// Registers all series again if the process has another recorder now, which was installed after the client was built.
/// Otherwise only compares two addresses.
#[cfg(feature = "metrics")]
fn register_at_new_recorder() {
    if REGISTERED_AT.load(Ordering::Relaxed) != recorder_address() {
        register();
    }
}

/// Describes all metrics, and registers all series whose labels are known: counters with the value zero.
pub(crate) fn register() {
    #[cfg(feature = "metrics")]
    catch_panics(|| {
        use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
        REGISTERED_AT.store(recorder_address(), Ordering::Relaxed);
        for (name, what, label) in COUNTERS {
            describe_counter!(name, Unit::Count, what);
            match label {
                None => metrics::counter!(name).increment(0),
                Some((label, values)) => {
                    for value in values {
                        metrics::counter!(name, label => *value).increment(0);
                    }
                }
            }
        }
        for (name, what) in HISTOGRAMS {
            describe_histogram!(name, Unit::Seconds, what);
            let _ = metrics::histogram!(name);
        }
        describe_gauge!(
            "leasehold_node_up",
            "Whether a node of a quorum votes (1) or not (0), since its first change"
        );
        describe_gauge!(
            "leasehold_node_clock_offset_seconds",
            Unit::Seconds,
            "How far the clock of a quorum's node is ahead of the median of all"
        );
        describe_gauge!(
            "leasehold_release_retries",
            Unit::Count,
            "Failed releases that will be retried"
        );
        // A level of zero would overwrite that of another client of the process, so this adds zero.
        metrics::gauge!("leasehold_release_retries").increment(0.0);
    });
}

/// The name of an error's kind, as a value of a label.
fn name_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::NoQuorum => "no_quorum",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Denied => "denied",
        ErrorKind::Tls => "tls",
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

#[cfg(test)]
#[cfg(feature = "metrics")]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::util::id::HolderId;

    fn values_of(counter: &str) -> &'static [&'static str] {
        let series = COUNTERS.iter().find(|(name, ..)| *name == counter);
        series.unwrap().2.unwrap().1
    }

    #[test]
    fn every_reason_of_a_loss_has_a_series() {
        let by = HolderId::of_text("host/7/a");
        let reasons = [
            LossReason::Expired,
            LossReason::TakenOver { by: None },
            LossReason::Deleted,
            LossReason::ForceUnlocked { by },
            LossReason::MaxHold,
            LossReason::NotRenewed,
            LossReason::ThreadEnded,
            LossReason::Shutdown,
        ];
        // A forked child reports no losses, so `Forked` has no series.
        assert_eq!(
            reasons.each_ref().map(name_of_loss),
            values_of("leasehold_losses_total")
        );
    }

    #[test]
    fn every_error_of_a_wait_has_a_series() {
        use ErrorKind::*;
        let kinds = [
            Unavailable,
            NoQuorum,
            Timeout,
            Denied,
            Tls,
            Cancelled,
            Shutdown,
            Protocol,
            NotHeld,
            InvalidKey,
        ];
        let values = values_of("leasehold_waits_total");
        assert!(kinds.map(name_of).iter().all(|name| values.contains(name)));
    }
}
