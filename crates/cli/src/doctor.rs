//! `leasehold doctor`: checks that Redis can keep locks, and says what to change. It prints a line for each check.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use leasehold::crossbeam_channel::{Receiver, Sender, unbounded};
use leasehold::{Client, Error, ErrorKind, EventHandler, LossReason, OtherLibrary};
use serde::Serialize;

use crate::args::Connection;
use crate::connection::Settings;
use crate::exit::{CONFLICT, Failure};
use crate::output::{Output, json, line};

/// How long Redis keeps the record of the check that records work.
const PROBE_RECORD: Duration = Duration::from_secs(60);

/// The number of pings. Their median is the latency.
const PINGS: usize = 11;
/// A greater latency is a warning.
const SLOW: Duration = Duration::from_millis(20);
/// A greater difference of the clocks is a warning.
const CLOCKS: Duration = Duration::from_secs(1);
/// The ttl of the lock that is taken away. Notifications work if they report the loss before the ttl ends. It is longer
/// than the pauses of a busy machine, and than the time-outs of a slow server, unless `max_ttl` is shorter.
const NOTIFIED_WITHIN: Duration = Duration::from_secs(30);
/// The maximum number of command time-outs until a notification comes: to connect, to take the lock away, to read its
/// key, and to confirm the loss.
const NOTIFIED_WITHIN_TIMEOUTS: u32 = 5;

/// The outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    Warning,
    Error,
}

/// A line of the report.
#[derive(Serialize)]
struct Finding {
    check: &'static str,
    level: Level,
    text: String,
}

/// Collects the findings, and prints each at once.
struct Report {
    output: Output,
    worst: Level,
}

impl Report {
    fn add(&mut self, check: &'static str, level: Level, text: impl Into<String>) {
        let finding = Finding {
            check,
            level,
            text: text.into(),
        };
        match self.output {
            Output::Json => json(&finding),
            Output::Text => {
                let mark = match level {
                    Level::Ok => "ok     ",
                    Level::Warning => "warning",
                    Level::Error => "error  ",
                };
                line(format_args!("{mark} {check:<13} {}", finding.text));
            }
        }
        let rank = |level: Level| level as u8;
        if rank(level) > rank(self.worst) {
            self.worst = level;
        }
    }

    fn add_error(&mut self, check: &'static str, error: &Error) {
        self.add(check, Level::Error, error.to_string());
    }
}

/// An event about notifications, from the callback thread of the client.
enum Event {
    /// The server refuses notifications, or a part of them.
    Refused(String),
    /// The lock that was taken away is lost.
    Lost(LossReason),
}

/// Receives the client's events.
struct Events {
    sender: Sender<Event>,
}

impl EventHandler for Events {
    fn notifications_refused(&self, error: &Error) {
        let _ = self.sender.send(Event::Refused(error.to_string()));
    }
}

pub fn run(connection: &Connection, output: Output) -> Result<ExitCode, Failure> {
    let settings = Settings::read(connection, None)?;
    let mut report = Report {
        output,
        worst: Level::Ok,
    };
    let (sender, events) = unbounded();
    let handler = Events {
        sender: sender.clone(),
    };
    let builder = settings
        .builder()?
        .event_handler(Arc::new(handler))
        .environment_check(false);
    let started = Instant::now();
    let client = match builder.build() {
        Ok(client) => client,
        Err(error) => {
            report.add_error("connection", &error);
            return Ok(ExitCode::from(Failure::from(error).code));
        }
    };
    report.add(
        "connection",
        Level::Ok,
        format!("connected within {:.1?}", started.elapsed()),
    );
    latency(&client, &mut report);
    environment(&client, &mut report);
    let probes = Probes::new(&client, &settings);
    if rights(&client, &probes, &mut report) {
        clocks(&client, &probes, &mut report);
        notifications(&client, &settings, &probes, (sender, &events), &mut report)?;
    }
    Ok(match report.worst {
        Level::Error => ExitCode::from(CONFLICT),
        _ => ExitCode::SUCCESS,
    })
}

fn latency(client: &Client, report: &mut Report) {
    let pings: Result<Vec<Duration>, Error> = (0..PINGS).map(|_| client.ping()).collect();
    match pings {
        Ok(mut times) => {
            times.sort_unstable();
            let (median, longest) = (times[PINGS / 2], times[PINGS - 1]);
            let figures = format!("replies take {median:.1?}, at most {longest:.1?}");
            match median > SLOW {
                true => report.add(
                    "latency",
                    Level::Warning,
                    format!("{figures}; each lock waits for one: use a Redis that is nearer"),
                ),
                false => report.add("latency", Level::Ok, figures),
            }
        }
        Err(error) => report.add_error("latency", &error),
    }
}

fn environment(client: &Client, report: &mut Report) {
    match client.check_environment() {
        Ok(findings) if findings.is_empty() => {
            report.add("settings", Level::Ok, "the settings of Redis keep locks");
        }
        Ok(findings) => {
            for finding in findings {
                report.add("settings", Level::Warning, finding.to_string());
            }
        }
        Err(error) => report.add_error("settings", &error),
    }
}

/// Uses a mutex, a permit, the record of a `Once` and the list, to test the rights. Returns whether the mutex works.
fn rights(client: &Client, probes: &Probes, report: &mut Report) -> bool {
    let key = probes.name("lock");
    let works = client
        .mutex(&key)
        .lock()
        .and_then(leasehold::MutexGuard::unlock);
    let works = match works {
        Ok(_) => {
            report.add("locks", Level::Ok, "a lock can be acquired and released");
            true
        }
        Err(error) => {
            report.add_error("locks", &error);
            false
        }
    };
    let shares = client.semaphore(probes.name("permits"), 1).acquire();
    let shares = shares.and_then(leasehold::SemaphorePermit::unlock);
    let readers = client.rw_lock(probes.name("readers"));
    let readers = shares.and_then(|_| readers.read()?.unlock());
    optional(
        report,
        "shared locks",
        "readers and permits work",
        "shares",
        readers.map(drop),
    );
    let once = client.once(probes.name("once")).keep(PROBE_RECORD);
    let ran = once.try_run(|_| Ok::<_, Error>(Vec::new()));
    let recorded = ran.and_then(|_| once.forget());
    optional(
        report,
        "once",
        "work can be recorded (--once)",
        "fenced-values",
        recorded.map(drop),
    );
    let listed = client
        .locks("doctor:")
        .take(1)
        .try_for_each(|found| found.map(drop));
    optional(report, "list", "locks can be listed", "list", listed);
    works
}

/// Reports the check of a feature that some users do not need.
fn optional(
    report: &mut Report,
    check: &'static str,
    works: &str,
    feature: &str,
    outcome: Result<(), Error>,
) {
    match outcome {
        Ok(()) => report.add(check, Level::Ok, works),
        Err(error) if error.kind() == ErrorKind::Denied => report.add(
            check,
            Level::Warning,
            format!("{error}; if you need it, use the rule of `leasehold acl --features usual,{feature}`"),
        ),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            report.add(check, Level::Ok, format!("not on this kind of Redis: {error}"));
        }
        Err(error) => report.add_error(check, &error),
    }
}

/// Takes a lock away from `client` by force, with another client, and waits for the notification.
///
/// The lock is not renewed, so only a notification can report its loss before the ttl ends. The client's callback thread
/// sends all events, in their order: a server refuses notifications when the client connects for them, and so before
/// it reports the loss.
fn notifications(
    client: &Client,
    settings: &Settings,
    probes: &Probes,
    (sender, events): (Sender<Event>, &Receiver<Event>),
    report: &mut Report,
) -> Result<(), Failure> {
    let operator = settings.builder()?.build_lazy()?;
    let ttl = settings.probe_ttl(NOTIFIED_WITHIN, NOTIFIED_WITHIN_TIMEOUTS)?;
    let mutex = client.mutex(probes.name("notified")).fixed_ttl(ttl);
    let guard = match mutex.lock() {
        Ok(guard) => guard,
        Err(error) => {
            report.add_error("notifications", &error);
            return Ok(());
        }
    };
    guard.on_lost(move |reason| {
        let _ = sender.send(Event::Lost(reason));
    });
    let started = Instant::now();
    if let Err(error) = operator.mutex(guard.key()).force_unlock() {
        report.add_error("notifications", &error);
        return Ok(());
    }
    let event = events.recv_timeout(2 * ttl);
    let took = started.elapsed();
    match fault_in(event.ok()) {
        None => report.add(
            "notifications",
            Level::Ok,
            format!("a holder learns of a loss within {took:.1?}"),
        ),
        Some(reason) => report.add(
            "notifications",
            Level::Warning,
            format!("{reason}; waiters poll, and a loss is found at the next renewal: allow `notifications` of `leasehold acl`"),
        ),
    }
    Ok(())
}

/// The reason for which notifications do not work, according to the first event after a lock was taken away.
fn fault_in(event: Option<Event>) -> Option<String> {
    match event {
        Some(Event::Refused(error)) => Some(error),
        Some(Event::Lost(LossReason::Expired)) | None => {
            Some("no notification has come".to_owned())
        }
        Some(Event::Lost(_)) => None,
    }
}

/// Compares the clock of Redis with that of this machine. The lock has a `min_hold`, so a script grants it, and its
/// value contains the time of the grant.
fn clocks(client: &Client, probes: &Probes, report: &mut Report) {
    let mutex = client
        .mutex(probes.name("clock"))
        .min_hold(Duration::from_millis(10));
    let before = SystemTime::now();
    let granted_at = mutex.lock().and_then(|_guard| {
        Ok(mutex
            .inspect()?
            .and_then(|info| info.holders()[0].granted_at()))
    });
    let after = SystemTime::now();
    let Ok(Some(granted_at)) = granted_at else {
        // A quorum refuses `min_hold`. The check of its settings compares the clocks of its nodes.
        return;
    };
    let since = |one: SystemTime, other: SystemTime| one.duration_since(other).unwrap_or_default();
    let differ = since(before, granted_at).max(since(granted_at, after));
    match differ > CLOCKS {
        true => report.add(
            "clocks",
            Level::Warning,
            format!(
                "the clocks of Redis and of this machine differ by {differ:.1?}: locks work, but times in logs differ; \
                 check NTP on both"
            ),
        ),
        false => report.add(
            "clocks",
            Level::Ok,
            format!("the clocks of Redis and of this machine differ by less than {CLOCKS:?}"),
        ),
    }
}

/// The names of the locks that the checks use.
struct Probes {
    end: String,
}

impl Probes {
    /// Other programs do not use these names. But Redisson's counter of tokens for a lock never expires, so beside it,
    /// all runs use the same names, one after another.
    fn new(client: &Client, settings: &Settings) -> Self {
        let is_counted = settings.other_library == Some(OtherLibrary::Redisson { fenced: true });
        Self {
            end: match is_counted {
                true => String::new(),
                false => format!(":{}", client.holder_id()),
            },
        }
    }

    fn name(&self, what: &str) -> String {
        format!("doctor:{what}{}", self.end)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use leasehold::crossbeam_channel::{RecvTimeoutError, bounded};
    use leasehold_testbed::Server;

    use super::*;

    /// Delays the first report of a refusal: until the gate's sender is dropped.
    struct Late {
        events: Events,
        gate: Receiver<()>,
    }

    impl EventHandler for Late {
        fn notifications_refused(&self, error: &Error) {
            let _ = self.gate.recv();
            self.events.notifications_refused(error);
        }
    }

    #[test]
    fn a_loss_is_notified_unless_the_ttl_ends() {
        let lost = |reason| fault_in(Some(Event::Lost(reason)));
        assert_eq!(lost(LossReason::Deleted), None);
        assert!(lost(LossReason::Expired).is_some());
        assert!(fault_in(None).is_some());
        let refused = fault_in(Some(Event::Refused("no".to_owned())));
        assert_eq!(refused.as_deref(), Some("no"));
    }

    /// The message about the loss comes, but the server refuses to report changes of keys.
    #[test]
    fn a_late_report_of_a_refusal_is_waited_for() {
        let server = Server::start().expect("a server can be started");
        let rule = ["ACL", "SETUSER", "default", "-client|tracking"];
        server.command(&rule).expect("the server runs");
        let connection = Connection {
            url: vec![server.url()],
            ..Connection::default()
        };
        let settings = Settings::read(&connection, None).expect("they are valid");
        let (sender, events) = unbounded();
        let (open, gate) = bounded(0);
        let handler = Late {
            events: Events {
                sender: sender.clone(),
            },
            gate,
        };
        let builder = settings.builder().expect("it is valid");
        let client = builder.event_handler(Arc::new(handler)).build();
        let client = client.expect("the server runs");
        let (end, ended) = bounded::<()>(0);
        let worst = thread::scope(|scope| {
            let check = scope.spawn(|| {
                let _end = end;
                let mut report = Report {
                    output: Output::Text,
                    worst: Level::Ok,
                };
                let probes = Probes::new(&client, &settings);
                let events = (sender, &events);
                notifications(&client, &settings, &probes, events, &mut report)
                    .expect("the server runs");
                report.worst
            });
            // A check that does not wait for the report ends long before this.
            let waited = ended.recv_timeout(Duration::from_secs(2));
            drop(open);
            assert_eq!(waited, Err(RecvTimeoutError::Timeout));
            check.join().expect("it does not panic")
        });
        assert_eq!(worst, Level::Warning);
    }
}
