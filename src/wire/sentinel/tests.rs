//! Sentinels in scripted roles, on real sockets: old answers, many sentinels, silence, messages.

#[cfg(feature = "__server_tests")]
pub mod switches;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::config::DEFAULT_MAX_REPLY;
use crate::process::threads::ThreadGroup;
use crate::store::observation::{NoListener, ServerId};
use crate::store::{Report, ReportedReleases, Reports};
use crate::util::id::HolderId;
use crate::wire::connect::epoch::SHORTEST_LIFE;
use crate::wire::connect::url;
use crate::wire::endpoint::Endpoint;
use crate::wire::endpoint::NamedBy;
use crate::wire::endpoint::watcher::SentinelWatcher;
use crate::wire::fake_server;
use crate::wire::notifications::NotificationConnection;

use super::*;

/// The longest time for a step that takes a moment on a machine that is not busy.
const LONG: Duration = Duration::from_secs(20);

/// The answers of a scripted sentinel.
#[derive(Default)]
struct Script {
    /// The port of the primary on 127.0.0.1. With 0, the sentinel does not answer.
    primary: u64,
    epoch: u64,
    others: Vec<u16>,
    denies_messages: bool,
    /// The words of each `HELLO`, joined.
    hellos: Vec<String>,
    /// Runs before each answer.
    before_answer: Option<Box<dyn Fn() + Send>>,
}

/// A scripted sentinel. Its threads end with the process.
struct Fake {
    port: u16,
    script: Arc<Mutex<Script>>,
    /// The connections that have subscribed.
    subscribed: Arc<Mutex<Vec<TcpStream>>>,
    queries: Arc<AtomicUsize>,
}

impl Fake {
    fn start(primary: u64, epoch: u64, others: Vec<u16>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let fake = Self {
            port: listener.local_addr().unwrap().port(),
            script: Arc::new(Mutex::new(Script {
                primary,
                epoch,
                others,
                denies_messages: false,
                hellos: Vec::new(),
                before_answer: None,
            })),
            subscribed: Arc::default(),
            queries: Arc::default(),
        };
        let (script, subscribed) = (Arc::clone(&fake.script), Arc::clone(&fake.subscribed));
        let queries = Arc::clone(&fake.queries);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (script, subscribed) = (Arc::clone(&script), Arc::clone(&subscribed));
                let queries = Arc::clone(&queries);
                thread::spawn(move || serve(&stream, &script, &subscribed, &queries));
            }
        });
        fake
    }

    fn publish(&self, message: &str) {
        let message = format!(
            ">3\r\n$7\r\nmessage\r\n$14\r\n+switch-master\r\n${}\r\n{message}\r\n",
            message.len()
        );
        for mut stream in self.subscribed.lock().iter() {
            stream.write_all(message.as_bytes()).unwrap();
        }
    }
}

fn serve(
    mut stream: &TcpStream,
    script: &Mutex<Script>,
    subscribed: &Mutex<Vec<TcpStream>>,
    queries: &AtomicUsize,
) {
    let mut lines = BufReader::new(stream);
    // A sentinel carries out the commands of a query together.
    let mut epoch_of_answer = 0;
    while let Some(words) = read_command(&mut lines) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut script = script.lock();
        let reply = match words[..] {
            ["HELLO", "2", ..] => {
                script.hellos.push(words.join(" "));
                "*2\r\n$5\r\nproto\r\n:2\r\n".to_owned()
            }
            ["HELLO", ..] => {
                script.hellos.push(words.join(" "));
                "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned()
            }
            ["SUBSCRIBE", ..] if script.denies_messages => {
                "-NOPERM this user has no permissions to run the 'subscribe' command\r\n".to_owned()
            }
            ["SUBSCRIBE", ..] => {
                subscribed.lock().push(stream.try_clone().unwrap());
                ">3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n".to_owned()
            }
            ["SENTINEL", ..] if script.primary == 0 => continue,
            ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "g"] => {
                queries.fetch_add(1, Ordering::SeqCst);
                script.before_answer.iter().for_each(|run| run());
                epoch_of_answer = script.epoch;
                let port = script.primary.to_string();
                format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len())
            }
            ["SENTINEL", "MASTER", "g"] => {
                let epoch = epoch_of_answer.to_string();
                format!(
                    "*2\r\n$12\r\nconfig-epoch\r\n${}\r\n{epoch}\r\n",
                    epoch.len()
                )
            }
            ["SENTINEL", "SENTINELS", "g"] => {
                let mut reply = format!("*{}\r\n", script.others.len());
                for port in &script.others {
                    let port = port.to_string();
                    reply += "*4\r\n$2\r\nip\r\n$9\r\n127.0.0.1\r\n$4\r\nport\r\n";
                    reply += &format!("${}\r\n{port}\r\n", port.len());
                }
                reply
            }
            _ => "-ERR unexpected\r\n".to_owned(),
        };
        drop(script);
        if stream.write_all(reply.as_bytes()).is_err() {
            return;
        }
    }
}

fn read_command(lines: &mut impl BufRead) -> Option<Vec<String>> {
    let number = |lines: &mut dyn BufRead| {
        let mut line = String::new();
        lines.read_line(&mut line).ok()?;
        line.get(1..)?.trim().parse::<usize>().ok()
    };
    let count = number(lines)?;
    (0..count)
        .map(|_| {
            let mut word = vec![0; number(lines)? + 2];
            lines.read_exact(&mut word).ok()?;
            word.truncate(word.len() - 2);
            String::from_utf8(word).ok()
        })
        .collect()
}

fn endpoint(sentinels: &[&Fake], timeout: Duration) -> Arc<Endpoint> {
    let hosts = sentinels
        .iter()
        .map(|sentinel| format!("127.0.0.1:{}", sentinel.port));
    let url = format!("redis+sentinel://{}/g", hosts.collect::<Vec<_>>().join(","));
    Arc::new(Endpoint::new(&url, timeout, DEFAULT_MAX_REPLY).unwrap())
}

/// An endpoint, and the reports that its sentinels are unavailable.
fn reporting_endpoint(sentinels: &[&Fake]) -> (Arc<Endpoint>, Arc<Mutex<Vec<String>>>) {
    let mut endpoint = Arc::into_inner(endpoint(sentinels, LONG)).unwrap();
    let errors = Arc::new(Mutex::new(Vec::new()));
    let reported = Arc::clone(&errors);
    endpoint.reports = Reports::new(ReportedReleases::None, move |report| {
        if let Report::SentinelsUnavailable(error) = report {
            reported.lock().push(error.to_string());
        }
    });
    (Arc::new(endpoint), errors)
}

fn find(endpoint: &Endpoint) -> Result<NamedPrimary, Error> {
    let deadline = MonotonicTime::now().after(LONG);
    endpoint
        .sentinels()
        .unwrap()
        .find_primary(&endpoint.dialer, deadline, &Sockets::default())
}

#[track_caller]
fn assert_eventually(what: &str, is_so: impl Fn() -> bool) {
    let deadline = MonotonicTime::now().after(LONG);
    while !is_so() {
        assert!(MonotonicTime::now() < deadline, "never: {what}");
        thread::yield_now();
    }
}

#[test]
fn the_last_sentinel_that_replied_is_asked_first() {
    let (silent, good) = (Fake::start(0, 0, vec![]), Fake::start(7000, 1, vec![]));
    let endpoint = endpoint(&[&silent, &good], LONG);
    let sentinels = endpoint.sentinels().unwrap();
    let started = MonotonicTime::now();
    let deadline = started.after(Duration::from_secs(9));
    let named = sentinels
        .find_primary(&endpoint.dialer, deadline, &Sockets::default())
        .unwrap();
    assert_eq!((named.primary.port, named.by.port), (7000, good.port));
    assert!(!named.has_changed);
    // The silent sentinel takes a third of the time, so there is time left for the server.
    assert!(MonotonicTime::now() < deadline);
    assert_eq!(sentinels.first().port, good.port);
}

#[test]
fn connections_to_sentinels_are_named_after_the_holder() {
    let fake = Fake::start(7000, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    let hellos = || std::mem::take(&mut fake.script.lock().hellos);
    find(&endpoint).unwrap();
    assert_eq!(hellos(), ["HELLO 2 SETNAME leasehold"]);
    let holder = HolderId::of_this_process();
    endpoint.dialer.name_connections(&holder);
    find(&endpoint).unwrap();
    assert_eq!(hellos(), [format!("HELLO 2 SETNAME leasehold:{holder}")]);
    watching(&endpoint, LONG, || {
        assert_eventually("a watcher", || !fake.script.lock().hellos.is_empty());
    });
    let name = format!("HELLO 3 SETNAME leasehold-sentinels:{holder}");
    assert_eq!(hellos()[0], name);
}

#[test]
fn an_answer_older_than_the_epoch_is_ignored() {
    let (old, new) = (Fake::start(7000, 4, vec![]), Fake::start(7001, 5, vec![]));
    let endpoint = endpoint(&[&new, &old], LONG);
    let sentinels = endpoint.sentinels().unwrap();
    assert_eq!(find(&endpoint).unwrap().primary.port, 7001);
    let new_host = sentinels.first();
    sentinels.doubt(&new_host);
    // The sentinel with the old answer is now asked first.
    let named = find(&endpoint).unwrap();
    assert_eq!((named.primary.port, named.by.port), (7001, new.port));
    // All answers are old, because the sentinels were reset.
    new.script.lock().epoch = 3;
    let named = find(&endpoint).unwrap();
    assert_eq!((named.primary.port, named.has_changed), (7000, true));
}

#[test]
fn outdated_answers_do_not_outlive_a_silent_sentinel() {
    let (old, new) = (Fake::start(7000, 4, vec![]), Fake::start(7001, 5, vec![]));
    let (endpoint, reports) = reporting_endpoint(&[&new, &old]);
    assert_eq!(find(&endpoint).unwrap().primary.port, 7001);
    // The sentinel that knows of the fail-over stops answering, before or after the outdated one is asked.
    new.script.lock().primary = 0;
    for first in [&new, &old] {
        let first = HostPort::new(b"127.0.0.1", first.port.to_string().as_bytes()).unwrap();
        let sentinels = endpoint.sentinels().unwrap();
        sentinels.state.lock().put_first(&first);
        let deadline = MonotonicTime::now().after(Duration::from_secs(6));
        let found = endpoint.find_server(deadline, &Sockets::default()).unwrap();
        assert_eq!(url::address(&found.info), "127.0.0.1:7001");
        assert!(matches!(found.named_by, Some(NamedBy::EarlierAnswer(_))));
    }
    let outdated = format!("127.0.0.1:{} does not know of the last fail-over", old.port);
    let reports = reports.lock();
    assert!(
        matches!(&reports[..], [one] if one.contains(&outdated)),
        "{reports:?}"
    );
}

#[test]
fn sentinels_that_are_gone_hide_no_new_group() {
    // Port 1, where the sentinel reports another sentinel, is closed.
    let fake = Fake::start(7000, 5, vec![1]);
    let endpoint = endpoint(&[&fake], LONG);
    assert_eq!(find(&endpoint).unwrap().primary.port, 7000);
    assert_eq!(endpoint.sentinels().unwrap().count(), 2);
    fake.script.lock().primary = 7001;
    fake.script.lock().epoch = 1;
    assert_eq!(find(&endpoint).unwrap().primary.port, 7001);
}

#[test]
fn a_fail_over_during_a_query_outdates_old_answers() {
    let fake = Fake::start(7000, 5, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    find(&endpoint).unwrap();
    let noting = Arc::clone(&endpoint);
    let record_fail_over = move || noting.sentinels().unwrap().state.lock().epoch += 1;
    {
        let mut script = fake.script.lock();
        (script.primary, script.epoch) = (7001, 1);
        script.before_answer = Some(Box::new(record_fail_over));
    }
    let error = find(&endpoint).err().unwrap();
    assert!(error.message().contains("the last fail-over"), "{error}");
    fake.script.lock().before_answer = None;
    assert_eq!(find(&endpoint).unwrap().primary.port, 7001);
}

#[test]
fn without_an_answer_the_last_primary_is_used() {
    let fake = Fake::start(7000, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    find(&endpoint).unwrap();
    fake.script.lock().primary = 0;
    let timeout = Duration::from_secs(8);
    let deadline = MonotonicTime::now().after(timeout);
    let found = endpoint.find_server(deadline, &Sockets::default()).unwrap();
    assert_eq!(url::address(&found.info), "127.0.0.1:7000");
    let Some(NamedBy::EarlierAnswer(error)) = &found.named_by else {
        panic!("named by a silent sentinel");
    };
    assert!(error.to_string().contains("no sentinel names"), "{error}");
    // Half of the time is left for the server.
    assert!(deadline.since(MonotonicTime::now()) > timeout / 2);
}

#[test]
fn unavailable_sentinels_are_reported_once() {
    let fake = Fake::start(7000, 1, vec![]);
    let (endpoint, reports) = reporting_endpoint(&[&fake]);
    let connect = |primary| {
        fake.script.lock().primary = primary;
        let deadline = MonotonicTime::now().after(Duration::from_millis(50));
        endpoint.find_server(deadline, &Sockets::default()).unwrap();
    };
    find(&endpoint).unwrap();
    for expected in 1..=2 {
        connect(0);
        connect(0);
        assert_eq!(reports.lock().len(), expected);
        fake.script.lock().primary = 7000;
        find(&endpoint).unwrap();
    }
    let report = reports.lock()[0].clone();
    assert!(report.contains("no sentinel names"), "{report}");
}

/// The first sentinel does not know of the fail-over.
#[test]
fn other_sentinels_are_asked_about_an_unreachable_primary() {
    let (stopped, address) = fake_server::accepts_nothing();
    let old = Fake::start(address.port().into(), 1, vec![]);
    let new = Fake::start(1, 2, vec![]);
    // The first attempt takes three quarters of this time. A busy machine may be late by an eighth.
    let endpoint = endpoint(&[&old, &new], Duration::from_secs(12));
    let error = endpoint.open().err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let primary = endpoint.sentinels().unwrap().last_primary().unwrap();
    assert_eq!(primary.port, 1);
    drop(stopped);
}

#[test]
fn pauses_between_attempts_double_up_to_a_bound() {
    let fake = Fake::start(1, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    let sentinels = endpoint.sentinels().unwrap();
    for millis in [20, 40, 80, 160, 320, 500, 500] {
        let before = MonotonicTime::now();
        let again_at = sentinels.lengthen_pause(LONG);
        let (pause, took) = (
            Duration::from_millis(millis),
            MonotonicTime::now().since(before),
        );
        assert!(again_at >= before.after(pause) && again_at <= before.after(pause + took));
        // A second failure in the same pause does not lengthen the pause again.
        let connect_again_at = sentinels.connect_again_at();
        assert_eq!(sentinels.lengthen_pause(LONG), connect_again_at);
        let mut state = sentinels.state.lock();
        state.connect_again_at = MonotonicTime::now();
    }
    sentinels.reset_pause();
    assert!(sentinels.connect_again_at() <= MonotonicTime::now());
    find(&endpoint).unwrap();
    let pause_for_long =
        || sentinels.state.lock().connect_again_at = MonotonicTime::now().after(LONG);
    pause_for_long();
    find(&endpoint).unwrap();
    assert!(sentinels.connect_again_at() > MonotonicTime::now());
    // Another primary ends the pause.
    fake.script.lock().primary = 2;
    find(&endpoint).unwrap();
    assert!(sentinels.connect_again_at() <= MonotonicTime::now());
}

#[test]
fn closing_an_endpoint_ends_its_queries() {
    let silent = Fake::start(0, 0, vec![]);
    let endpoint = endpoint(&[&silent], 3 * LONG);
    thread::scope(|scope| {
        let attempt = scope.spawn(|| endpoint.open().err().unwrap());
        assert_eventually("a query", || endpoint.queries_under_way() == 1);
        let closed_at = MonotonicTime::now();
        endpoint.close();
        assert_eq!(attempt.join().unwrap().kind(), ErrorKind::Unavailable);
        assert!(MonotonicTime::now().since(closed_at) < LONG);
    });
    assert_eq!(endpoint.queries_under_way(), 0);
}

#[test]
fn the_error_of_a_sentinel_repeats_no_login() {
    let info = "redis://u:s3cret@h".into_connection_info().unwrap();
    let attempted = ConnectErrors::new(
        &info,
        Duration::from_nanos(499_994_449),
        "a part of `connect_timeout`",
        "p:",
    );
    for code in ["NOAUTH", "WRONGPASS", "ERR", "OTHER"] {
        let line = format!("-{code} you sent s3cret\r\n");
        let Value::ServerError(reply) = redis::parse_redis_value(line.as_bytes()).unwrap() else {
            panic!("{line}");
        };
        let error = attempted.refused_by_sentinel("HELLO", &reply);
        assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    }
    let late = redis::RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
    let error = attempted.no_reply_error(Step::AskSentinel, None, late, b"");
    let part = "within 499ms (a part of `connect_timeout`)";
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn known_sentinels_are_bounded() {
    let many: Vec<u16> = (1..=300).collect();
    let fake = Fake::start(7000, 1, many);
    let endpoint = endpoint(&[&fake], LONG);
    let sentinels = endpoint.sentinels().unwrap();
    let known = || sentinels.state.lock().order.clone();
    find(&endpoint).unwrap();
    assert_eq!(known().len(), MAX_SENTINELS);
    // Sentinels of a new answer replace those of an earlier answer, but not those of the URL.
    fake.script.lock().others = vec![5, 1000];
    find(&endpoint).unwrap();
    let ports: Vec<u16> = known().iter().map(|sentinel| sentinel.port).collect();
    assert_eq!(ports, [fake.port, 5, 1000]);
}

#[test]
fn impossible_answers_are_refused() {
    let fake = Fake::start(70_000, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    let error = find(&endpoint).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    // After the client has found the group, callers try again.
    fake.script.lock().primary = 7000;
    find(&endpoint).unwrap();
    fake.script.lock().primary = 70_000;
    let error = find(&endpoint).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let host = |host: &[u8]| HostPort::new(host, b"1");
    assert!(host(b"a.b").is_some() && host(b"::1").is_some());
    for bad in [
        &b""[..],
        b"a b",
        b"a/b",
        b"a@b",
        b"a\n",
        b"a%41",
        &[b'a'; 256],
        b"\xff",
    ] {
        assert_eq!(host(bad), None, "{bad:?}");
    }
    assert_eq!(HostPort::new(b"h", b"0"), None);
}

/// Runs the watcher of an endpoint during `work`.
fn watching(endpoint: &Arc<Endpoint>, timeout: Duration, work: impl FnOnce()) {
    let threads = ThreadGroup::new();
    let watcher = Arc::new(SentinelWatcher::new(Arc::clone(endpoint), timeout));
    watcher.start(&threads).unwrap();
    work();
    watcher.stop();
    assert!(threads.wait_until_ended(MonotonicTime::now().after(LONG)));
}

/// The watcher asks the second sentinel, which never replies.
#[test]
fn the_end_of_the_watcher_ends_its_queries() {
    let (first, silent) = (Fake::start(7000, 1, vec![]), Fake::start(0, 0, vec![]));
    let endpoint = endpoint(&[&first, &silent], LONG);
    let mut watcher = SentinelWatcher::new(endpoint, LONG);
    watcher.other_timeout = 3 * LONG;
    let (watcher, threads) = (Arc::new(watcher), ThreadGroup::new());
    watcher.start(&threads).unwrap();
    assert_eventually("a query", || watcher.sockets.count() == 2);
    watcher.stop();
    assert!(threads.wait_until_ended(MonotonicTime::now().after(LONG)));
}

#[test]
fn a_fail_over_message_makes_connections_suspect() {
    let fake = Fake::start(7000, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    watching(&endpoint, LONG, || {
        let queries = || fake.queries.load(Ordering::SeqCst);
        assert_eventually("a query", || queries() == 1);
        let named = || named(&endpoint);
        assert_eventually("an answer", || named() == Some(7000));
        let made = endpoint.epoch().now();
        fake.publish("other 127.0.0.1 7000 127.0.0.1 7009");
        fake.publish("g 127.0.0.1 7000 127.0.0.1");
        fake.publish("g 127.0.0.1 7000 127.0.0.1 7000");
        // A late message about an earlier fail-over.
        fake.publish("g 127.0.0.1 6999 127.0.0.1 7009");
        // From now on, the answers name the new primary. The client asks again after a message.
        let mut script = fake.script.lock();
        (script.primary, script.epoch) = (7001, 2);
        drop(script);
        fake.publish("g 127.0.0.1 7000 127.0.0.1 7001");
        assert_eventually("the new primary", || named() == Some(7001));
        assert_eventually("a suspicion", || {
            endpoint.epoch().replace_at(&made).is_some()
        });
        let doubts = endpoint.sentinels().unwrap().doubts();
        assert_eq!(doubts, 1);
    });
}

/// The connection to the sentinel broke before its message came.
#[test]
fn a_fail_over_without_a_message_is_noticed() {
    let fake = Fake::start(7000, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    watching(&endpoint, LONG, || {
        let queries = || fake.queries.load(Ordering::SeqCst);
        assert_eventually("a query", || queries() == 1);
        let named = || named(&endpoint);
        assert_eventually("an answer", || named() == Some(7000));
        let made = endpoint.epoch().now();
        fake.script.lock().primary = 7001;
        let streams = std::mem::take(&mut *fake.subscribed.lock());
        for stream in streams {
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        }
        assert_eventually("a suspicion", || {
            endpoint.epoch().replace_at(&made).is_some()
        });
        assert_eq!(named(), Some(7001));
    });
}

#[test]
fn a_silent_sentinel_is_left_for_another() {
    let (first, second) = (Fake::start(7000, 1, vec![]), Fake::start(7000, 1, vec![]));
    let endpoint = endpoint(&[&first, &second], LONG);
    watching(&endpoint, SHORTEST_LIFE, || {
        assert_eventually("the first", || first.subscribed.lock().len() == 1);
        first.script.lock().primary = 0;
        assert_eventually("the second", || second.subscribed.lock().len() == 1);
    });
}

fn named(endpoint: &Endpoint) -> Option<u16> {
    let primary = endpoint.sentinels().unwrap().last_primary();
    primary.map(|primary| primary.port)
}

/// The sentinel that the thread listens to is cut off from the others, and does not know of a fail-over.
#[test]
fn a_fail_over_known_elsewhere_is_noticed() {
    let (cut_off, other) = (Fake::start(7000, 1, vec![]), Fake::start(7001, 2, vec![]));
    let endpoint = endpoint(&[&cut_off, &other], LONG);
    let made = endpoint.epoch().now();
    watching(&endpoint, LONG, || {
        assert_eventually("the new primary", || named(&endpoint) == Some(7001));
        assert_eventually("a suspicion", || {
            endpoint.epoch().replace_at(&made).is_some()
        });
        assert_eventually("the other", || other.subscribed.lock().len() == 1);
        assert_eq!(endpoint.sentinels().unwrap().first().port, other.port);
    });
}

#[test]
fn queries_find_the_primary_without_a_subscription() {
    let fake = Fake::start(7000, 1, vec![]);
    fake.script.lock().denies_messages = true;
    let endpoint = endpoint(&[&fake], LONG);
    watching(&endpoint, LONG, || {
        assert_eventually("an answer", || named(&endpoint) == Some(7000));
    });
}

#[test]
fn unreachable_sentinels_are_tried_with_growing_pauses() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis+sentinel://{}/g", listener.local_addr().unwrap());
    let endpoint = Arc::new(Endpoint::new(&url, LONG, DEFAULT_MAX_REPLY).unwrap());
    let started = MonotonicTime::now();
    let count = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&count);
    thread::spawn(move || {
        for stream in listener.incoming() {
            counter.fetch_add(1, Ordering::SeqCst);
            drop(stream);
        }
    });
    watching(&endpoint, LONG, || {
        assert_eventually("seven attempts", || count.load(Ordering::SeqCst) >= 7);
    });
    // 10, 20, 40, 80, 160 and 320 ms.
    let took = MonotonicTime::now().since(started);
    assert!(took >= Duration::from_millis(630), "{took:?}");
}

/// The sentinels name another primary after an attempt to connect has found the old one.
#[test]
fn no_connection_to_a_replaced_primary_is_begun() {
    let fake = Fake::start(7000, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    let deadline = MonotonicTime::now().after(LONG);
    let found = endpoint.find_server(deadline, &Sockets::default()).unwrap();
    assert!(endpoint.begin_connection(&found).is_ok());
    fake.script.lock().primary = 7001;
    find(&endpoint).unwrap();
    let error = endpoint.begin_connection(&found).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error
            .to_string()
            .contains("127.0.0.1:7000 is no primary any more"),
        "{error}"
    );
    let again = endpoint.find_server(deadline, &Sockets::default()).unwrap();
    assert!(endpoint.begin_connection(&again).is_ok());
}

/// A query was under way during the fail-over, or its sentinel does not know of the fail-over yet.
#[test]
fn an_answer_older_than_a_message_is_outdated() {
    let fake = Fake::start(7000, 1, vec![]);
    let endpoint = endpoint(&[&fake], LONG);
    let sentinels = endpoint.sentinels().unwrap();
    let by = find(&endpoint).unwrap().by;
    let host = |port| HostPort::new(b"127.0.0.1", port).unwrap();
    let answer = |port, epoch| Answer {
        primary: host(port),
        epoch: Some(epoch),
        others: Vec::new(),
    };
    let switch = |from, to| Switch {
        from: host(from),
        to: host(to),
    };
    assert!(sentinels.apply_switch(&by, &switch(b"7000", b"7001")));
    let old = sentinels.accept_if(&by, answer(b"7000", 1), State::is_current);
    assert_eq!(old.err().unwrap(), answer(b"7000", 1));
    assert_eq!(named(&endpoint), Some(7001));
    assert!(
        sentinels
            .accept_if(&by, answer(b"7001", 2), State::is_current)
            .is_ok()
    );
    // Messages that come late.
    assert!(!sentinels.apply_switch(&by, &switch(b"7000", b"7001")));
    assert!(!sentinels.apply_switch(&by, &switch(b"7000", b"7002")));
    assert_eq!(named(&endpoint), Some(7001));
}

/// The notification connection follows the same rules as the others: it pauses, and asks another sentinel.
#[test]
fn notifications_leave_a_sentinel_with_a_wrong_primary() {
    let (_socket, address) = fake_server::refuses_connections();
    let closed_port = u64::from(address.port());
    let wrong = Fake::start(closed_port, 1, vec![]);
    let right = Fake::start(closed_port, 1, vec![]);
    let endpoint = endpoint(&[&wrong, &right], LONG);
    let sentinels = endpoint.sentinels().unwrap();
    let before = sentinels.connect_again_at();
    while_notifications_connect(&endpoint, || {
        assert_eventually("a query to the other", || {
            right.queries.load(Ordering::SeqCst) > 0
        });
        assert!(sentinels.connect_again_at() > before);
    });
}

/// Runs `work` while the notification connection of a client tries to connect.
fn while_notifications_connect(endpoint: &Arc<Endpoint>, work: impl FnOnce()) {
    let holder = HolderId::of_this_process();
    let notifications =
        NotificationConnection::new(ServerId::ONLY, Arc::clone(endpoint), &holder, "p:", LONG);
    let notifications = Arc::new(notifications);
    let threads = ThreadGroup::new();
    notifications.start(&threads, Arc::new(NoListener)).unwrap();
    notifications.request_connection();
    work();
    notifications.stop();
    assert!(threads.wait_until_ended(MonotonicTime::now().after(LONG)));
}
