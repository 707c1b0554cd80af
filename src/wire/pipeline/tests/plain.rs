//! Tests of acquires by plain commands, and of the script calls that follow if plain commands do not decide.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use super::*;
use crate::command::value::micros_of;
use crate::command::{Acquire, Mode, QueueMode, Renew};
use crate::wire::net::refusal;

/// A pipeline that knows the time of Redis, so that its next acquire uses plain commands.
fn warm() -> Fixture {
    let f = fixture();
    f.warm_up("warm-up");
    f
}

impl Fixture {
    /// Makes another connection, which has not seen any contention, and knows the time of Redis.
    fn reconnect(&self) {
        self.cut();
        assert!(eventually(LONG, || self
            .acquire_within("cut", LONG)
            .1
            .is_err()));
        self.warm_up("reconnected");
    }

    /// How often the server has refused a command because of an ACL.
    fn denied(&self) -> u64 {
        let stats = self.say(&["INFO", "errorstats"]);
        let mut lines = stats.as_text().unwrap().lines();
        let denied = lines.find_map(|line| line.strip_prefix("errorstat_NOPERM:count="));
        denied.map_or(0, |count| count.parse().unwrap())
    }

    /// The numbers of transactions and of script calls.
    fn used(&self) -> [u64; 2] {
        ["exec", "evalsha"].map(|name| self.server.calls(name).unwrap())
    }

    fn used_since(&self, before: [u64; 2]) -> [u64; 2] {
        let used = self.used();
        [0, 1].map(|n| used[n] - before[n])
    }

    fn say(&self, words: &[&str]) -> leasehold_testbed::Reply {
        self.server.command(words).unwrap()
    }

    fn value(&self, name: &str) -> Option<String> {
        let value = self.say(&["GET", &format!("p:{name}")]);
        value.as_text().map(str::to_owned)
    }

    fn counter(&self) -> u64 {
        self.say(&["ZSCORE", "p:~fence", "t"]).as_int().unwrap() as u64
    }

    fn grant(&self, command: Command) -> (u64, bool) {
        match self.ask(command, LONG) {
            Ok(Reply::Granted {
                token,
                is_token_in_value,
            }) => (token, is_token_in_value),
            other => panic!("not granted: {other:?}"),
        }
    }

    fn refused(&self, name: &str) -> ErrorKind {
        let (_, outcome) = self.acquire_within(name, LONG);
        outcome.expect_err("refused").kind()
    }

    /// A name whose key has an unused entry in `ContendedKeys`. A hash with a random seed chooses the entry of a key,
    /// so no fixed name will do.
    fn uncontended(&self) -> String {
        let state = self.pipeline.state.lock();
        let connection = state.connection.as_ref().unwrap();
        let mut names = (0..10_000).map(|n| format!("uncontended {n}"));
        let name = names.find(|name| !connection.is_contended(&key(name)));
        name.expect("only a few of the entries are in use")
    }

    /// How often the client was told that it uses the script only.
    fn refusals(&self) -> usize {
        self.refusals.load(Ordering::SeqCst)
    }
}

fn waiting(name: &str) -> Command {
    let mut command = acquire_of(name);
    if let Command::Acquire(Acquire { queue_mode, .. }) = &mut command {
        *queue_mode = QueueMode::Polling;
    }
    command
}

#[test]
fn free_keys_are_granted_without_a_script() {
    let f = fixture();
    let before = f.used();
    f.acquire("first");
    assert_eq!(f.used_since(before), [0, 1], "the script only");
    f.acquire("second");
    assert_eq!(f.used_since(before), [1, 2], "a trial, and the script");
    let before = f.used();
    let mut last = 0;
    for (n, command) in [acquire_of("a"), waiting("b"), waiting("c")]
        .into_iter()
        .enumerate()
    {
        let (token, is_token_in_value) = f.grant(command);
        assert!(token > last && !is_token_in_value, "{n}: {token}");
        assert_eq!(micros_of(token), f.counter());
        last = token;
    }
    assert_eq!(f.used_since(before), [3, 0]);
    let value = f.value("a").unwrap();
    assert!(value.contains(" 0000000000000000 "), "{value}");
    assert_eq!(
        f.say(&["PTTL", "p:a"]).as_int().map(|ms| ms > 0),
        Some(true)
    );
}

#[test]
fn each_grant_of_a_batch_has_its_own_token() {
    let f = warm();
    let before = f.used();
    let outcomes = f.execute((0..300).map(|n| acquire_of(&n.to_string())));
    let tokens = outcomes.into_iter().map(|outcome| match outcome {
        Ok(Reply::Granted { token, .. }) => micros_of(token),
        other => panic!("{other:?}"),
    });
    let tokens: Vec<u64> = tokens.collect();
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    assert_eq!(tokens.last(), Some(&f.counter()));
    assert_eq!(f.used_since(before), [3, 0]);
}

#[test]
fn grants_without_stored_tokens_are_released_and_renewed() {
    let f = warm();
    let (lease, outcome) = f.acquire_within("k", LONG);
    let Ok(Reply::Granted {
        token,
        is_token_in_value: false,
    }) = outcome
    else {
        panic!("{outcome:?}");
    };
    let renew = Command::Renew(Renew {
        mode: Mode::Exclusive,
        key: key("k"),
        lease,
        token,
        ttl: 2 * LONG,
        replicas: None,
    });
    assert_eq!(f.ask(renew, LONG).unwrap(), Reply::Done);
    assert!(f.say(&["PTTL", "p:k"]).as_int() > Some(LONG.as_millis() as i64));
    let mut release = f.release("k", lease);
    release.held = Some(Held {
        token,
        is_token_in_value: false,
        others_queued: false,
        valid_until: MonotonicTime::at_tick(0),
    });
    assert_eq!(f.ask(Command::Release(release), LONG).unwrap(), Reply::Done);
    assert!(!f.exists("k"));
}

/// The command of this server that deletes a key with a certain value.
fn plain_delete(f: &Fixture) -> Option<&'static str> {
    let tried: [(_, &[&str]); 2] = [
        ("delex", &["DELEX", "p:none", "IFEQ", "x"]),
        ("delifeq", &["DELIFEQ", "p:none", "x"]),
    ];
    let has = |words: &[&str]| {
        f.server
            .command(words)
            .is_ok_and(|it| it.as_int() == Some(0))
    };
    let found = tried.into_iter().find(|(_, words)| has(words));
    found.map(|(name, _)| name)
}

impl Fixture {
    /// Acquires a key, and returns the release of its guard.
    fn held(&self, name: &str) -> Command {
        let lease = LeaseId::random();
        let (token, is_token_in_value) = self.grant(acquire_under(lease, name));
        let mut release = self.release(name, lease);
        release.held = Some(Held {
            token,
            is_token_in_value,
            others_queued: false,
            valid_until: MonotonicTime::at_tick(0),
        });
        Command::Release(release)
    }
}

/// A fixture that has found out how its server deletes keys with certain values.
fn after_releases() -> Fixture {
    let f = warm();
    // The trials of commands are written behind the first release. Their replies come before the reply to the second
    // one.
    for _ in 0..2 {
        let release = f.held("k");
        assert_eq!(f.ask(release, LONG).unwrap(), Reply::Done);
        assert!(!f.exists("k"));
    }
    f
}

#[test]
fn a_lock_without_waiters_is_released_without_a_script() {
    let f = after_releases();
    let name = plain_delete(&f);
    let deletes = || name.map_or(0, |name| f.server.calls(name).unwrap());
    let (before, used) = (deletes(), f.used());
    let release = f.held("k");
    assert_eq!(f.ask(release, LONG).unwrap(), Reply::Done);
    assert!(!f.exists("k"));
    let is_plain = u64::from(name.is_some());
    assert_eq!(deletes() - before, is_plain);
    assert_eq!(f.used_since(used), [1, 1 - is_plain]);
}

#[test]
fn the_script_releases_what_a_command_does_not() {
    let f = after_releases();
    // The value reports queued waiters.
    let release = f.held("a");
    f.say(&["APPEND", "p:a", " +"]);
    assert_eq!(f.ask(release, LONG).unwrap(), Reply::Done);
    assert!(!f.exists("a"));
    let release = f.held("b");
    f.say(&["DEL", "p:b"]);
    assert_eq!(f.ask(release, LONG).unwrap(), Reply::Missing);
    let release = f.held("c");
    f.say(&["DEL", "p:c"]);
    f.acquire("c");
    let outcome = f.ask(release, LONG).unwrap();
    assert!(matches!(outcome, Reply::Taken { .. }), "{outcome:?}");
    assert!(f.exists("c"));
    let release = f.held("d");
    f.say(&["DEL", "p:d"]);
    f.say(&["RPUSH", "p:d", "theirs"]);
    assert_eq!(f.ask(release, LONG).unwrap(), Reply::Taken { by: None });
}

/// An unawaited release must not need a second request: its reply is read later, and the process may end before.
#[test]
fn a_dropped_lock_is_released_by_one_write() {
    let f = after_releases();
    let name = plain_delete(&f);
    let deletes = || name.map_or(0, |name| f.server.calls(name).unwrap());
    let before = deletes();
    let release = f.held("k").as_release().cloned();
    f.say(&["APPEND", "p:k", " +"]);
    f.pipeline.send_release(release.unwrap());
    // No thread reads the reply.
    assert!(eventually(LONG, || !f.exists("k")));
    assert_eq!(deletes(), before);
}

/// The acquire is behind a release that the script has to repeat, and that grants the lock to a waiter.
#[test]
fn an_acquire_behind_a_repeated_release_ends() {
    let f = after_releases();
    let (other, release) = (LeaseId::random(), f.held("k"));
    let calls = || f.server.calls("evalsha").unwrap();
    let before = calls();
    let value = format!("lh1 {other} 1795263780943818 host/1/a");
    f.say(&["SET", "p:k", &value, "PX", "60000"]);
    let acquire = acquire_under(LeaseId::random(), "k");
    let outcomes = f.execute([release, acquire]);
    assert!(
        matches!(
            outcomes[..],
            [Ok(Reply::Taken { .. }), Ok(Reply::Contended { .. })]
        ),
        "{outcomes:?}"
    );
    assert!(calls() - before <= 3, "{}", calls() - before);
}

/// If a command were tried first, the next waiter would get the lock one round trip later.
#[test]
fn the_script_releases_a_contended_key_at_once() {
    let f = after_releases();
    let name = plain_delete(&f);
    let deletes = || name.map_or(0, |name| f.server.calls(name).unwrap());
    for tries in [1, 0] {
        let before = deletes();
        let release = f.held("k");
        f.say(&["APPEND", "p:k", " +"]);
        assert_eq!(f.ask(release, LONG).unwrap(), Reply::Done);
        let is_plain = u64::from(name.is_some());
        assert_eq!(deletes() - before, tries * is_plain);
    }
}

#[test]
fn a_refused_delete_is_left_to_the_script() {
    let f = after_releases();
    let name = plain_delete(&f);
    if let Some(name) = name {
        f.say(&["ACL", "SETUSER", "default", &format!("-{name}")]);
    }
    for is_new in [false, true] {
        if is_new {
            f.reconnect();
        }
        for _ in 0..3 {
            let release = f.held("k");
            assert_eq!(f.ask(release, LONG).unwrap(), Reply::Done);
            assert!(!f.exists("k"));
        }
        assert_eq!(f.denied(), u64::from(name.is_some()), "{is_new}");
    }
}

/// The releases of a batch, of which some have to be decided by the script.
#[test]
fn a_batch_of_releases_has_all_outcomes() {
    let f = after_releases();
    for count in [3, 20] {
        let names: Vec<String> = (0..count).map(|n| format!("b{n}")).collect();
        let releases: Vec<Command> = names.iter().map(|name| f.held(name)).collect();
        f.say(&["DEL", "p:b1"]);
        for (n, outcome) in f.execute(releases).into_iter().enumerate() {
            let wanted = if n == 1 { Reply::Missing } else { Reply::Done };
            assert_eq!(outcome.unwrap(), wanted, "{n} of {count}");
        }
        assert!(names.iter().all(|name| !f.exists(name)));
    }
}

#[test]
fn the_script_acquires_a_contended_key() {
    let f = warm();
    f.acquire("k");
    let before = f.used();
    for _ in 0..2 {
        let (_, outcome) = f.acquire_within("k", LONG);
        assert!(
            matches!(outcome, Ok(Reply::Contended { .. })),
            "{outcome:?}"
        );
    }
    // The first request has found the key taken. The second one is a script call at once.
    assert_eq!(f.used_since(before), [1, 2]);
    f.acquire(&f.uncontended());
    assert_eq!(f.used_since(before), [2, 2]);
}

#[test]
fn a_free_key_goes_to_the_first_waiter() {
    let f = warm();
    let join = |f: &Fixture, name: &str| f.ask(waiting(name), LONG);
    f.acquire("k");
    assert!(matches!(
        join(&f, "k"),
        Ok(Reply::Contended {
            queued: Some(_),
            ..
        })
    ));
    f.say(&["DEL", "p:k"]);
    // Another connection has not seen the contention.
    f.reconnect();
    let before = f.used();
    let outcome = join(&f, "k");
    assert!(
        matches!(outcome, Ok(Reply::Contended { queued: Some(queued), .. }) if queued.ahead == 0),
        "{outcome:?}"
    );
    assert_eq!(f.used_since(before), [1, 1]);
    assert!(
        f.value("k").unwrap().ends_with(" +"),
        "the first waiter has it"
    );
}

#[test]
fn try_lock_goes_past_the_queue() {
    let f = warm();
    f.acquire("k");
    f.ask(waiting("k"), LONG).unwrap();
    f.say(&["DEL", "p:k"]);
    f.reconnect();
    let before = f.used();
    f.acquire("k");
    assert_eq!(f.used_since(before), [1, 0]);
}

/// With a counter that is missing or behind the clock, old tokens would be given again.
#[test]
fn tokens_rise_over_a_lost_counter() {
    let f = warm();
    let (before, _) = f.grant(acquire_of("a"));
    f.say(&["DEL", "p:~fence"]);
    let used = f.used();
    let (token, is_token_in_value) = f.grant(acquire_of("b"));
    assert!(token > before && is_token_in_value);
    assert_eq!(f.used_since(used), [1, 1], "the script has granted it");
    // Plain commands never make a counter: such a counter could be behind the clock of Redis, and give old tokens to
    // other clients.
    f.say(&["DEL", "p:~fence"]);
    f.say(&["ACL", "SETUSER", "default", "-@scripting"]);
    assert_eq!(f.refused("no counter"), ErrorKind::Denied);
    assert_eq!(f.say(&["EXISTS", "p:~fence"]).as_int(), Some(0));
    f.say(&["ACL", "SETUSER", "default", "+@scripting"]);
    f.acquire("counted");
    assert!(
        f.value("b")
            .unwrap()
            .contains(&micros_of(token).to_string())
    );
    // A replica that was behind when it became the primary has such a counter.
    f.say(&["ZADD", "p:~fence", "1700000000000000", "t"]);
    let used = f.used();
    let (next, is_token_in_value) = f.grant(acquire_of("c"));
    assert!(next > token && !is_token_in_value, "{next} after {token}");
    assert_eq!(f.used_since(used), [1, 0]);
}

#[test]
fn a_counter_ahead_of_the_clock_counts_on() {
    let f = warm();
    let ahead = 4_000_000_000_000_000_u64;
    f.say(&["ZADD", "p:~fence", &ahead.to_string(), "t"]);
    for n in 1..4 {
        let (token, is_token_in_value) = f.grant(acquire_of(&n.to_string()));
        assert_eq!((micros_of(token), is_token_in_value), (ahead + n, false));
    }
}

#[test]
fn an_unusable_counter_leaves_no_key() {
    let f = warm();
    let spoils: &[&[&str]] = &[
        &["SET", "p:~fence", "1795263780943818"],
        &["RPUSH", "p:~fence", "t"],
        &["ZADD", "p:~fence", "9007199254740992", "t"],
        &["ZADD", "p:~fence", "inf", "t"],
    ];
    for (n, spoil) in spoils.iter().enumerate() {
        f.say(&["DEL", "p:~fence"]);
        f.say(spoil);
        let name = n.to_string();
        assert_eq!(f.refused(&name), ErrorKind::Protocol, "{spoil:?}");
        assert!(!f.exists(&name), "{spoil:?}");
    }
}

#[test]
fn the_estimate_replaces_an_old_unusable_counter() {
    let f = warm();
    f.say(&["DEL", "p:~fence"]);
    f.say(&["ZADD", "p:~fence", "1795263780943818.5", "t"]);
    f.acquire("k");
}

#[test]
fn without_transactions_the_script_grants() {
    for rule in ["-multi", "-exec", "-time"] {
        for warm in [false, true] {
            let f = fixture();
            if warm {
                f.warm_up("warm-up");
            }
            f.say(&["ACL", "SETUSER", "default", rule]);
            if rule == "-time" {
                // The scripts need this command, too. A warm connection asks for the time only once a second.
                if warm {
                    let mut state = f.pipeline.state.lock();
                    state.connection.as_mut().unwrap().age_clock();
                }
                assert_eq!(f.refused("k"), ErrorKind::Denied, "{warm}");
                assert!(eventually(LONG, || {
                    f.pipeline.run_maintenance();
                    !f.exists("k")
                }));
                continue;
            }
            let mut granted = 0;
            for n in 0..4 {
                let (_, outcome) = f.acquire_within(&n.to_string(), LONG);
                granted += usize::from(outcome.is_ok());
            }
            assert_eq!(granted, 4, "{rule} {warm}");
            assert_eq!(f.refusals(), 1, "{rule} {warm}");
            let before = f.used();
            f.acquire("k");
            assert_eq!(f.used_since(before)[1], 1, "{rule} {warm}");
        }
    }
}

/// These refusals do not show whether the server accepts transactions.
#[test]
fn refusals_of_one_request_do_not_end_plain_commands() {
    let f = warm();
    f.say(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(f.refused("k"), ErrorKind::Unavailable);
    f.say(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(!f.exists("k"));
    f.say(&["ACL", "SETUSER", "default", "resetkeys", "~p:~*", "~p:k"]);
    let mut outcomes = f.execute(["k", "other"].map(acquire_of));
    let other = outcomes.pop().unwrap();
    assert!(
        matches!(outcomes[..], [Ok(Reply::Granted { .. })]),
        "{outcomes:?}"
    );
    assert_eq!(other.unwrap_err().kind(), ErrorKind::Denied);
    f.say(&["ACL", "SETUSER", "default", "allkeys"]);
    assert_eq!(f.refusals(), 0);
    let before = f.used();
    f.acquire(&f.uncontended());
    assert_eq!(f.used_since(before), [1, 0]);
}

#[test]
fn a_foreign_value_is_refused_by_the_script() {
    let f = warm();
    f.say(&["RPUSH", "p:k", "theirs"]);
    assert_eq!(f.refused("k"), ErrorKind::Protocol);
    f.say(&["SET", "p:l", "theirs"]);
    assert_eq!(f.refused("l"), ErrorKind::Protocol);
    assert_eq!(f.value("l").as_deref(), Some("theirs"));
}

#[test]
fn a_lock_without_a_ttl_gets_one() {
    let f = warm();
    f.acquire("k");
    f.say(&["PERSIST", "p:k"]);
    f.reconnect();
    let (_, outcome) = f.acquire_within("k", LONG);
    assert!(
        matches!(outcome, Ok(Reply::Contended { .. })),
        "{outcome:?}"
    );
    assert!(f.say(&["PTTL", "p:k"]).as_int() > Some(0));
}

#[test]
fn a_flushed_script_is_sent_again() {
    let f = warm();
    f.acquire("k");
    f.say(&["SCRIPT", "FLUSH"]);
    let (_, outcome) = f.acquire_within("k", LONG);
    assert!(
        matches!(outcome, Ok(Reply::Contended { .. })),
        "{outcome:?}"
    );
    assert_eq!(f.server.calls("eval").unwrap(), 1);
}

/// Without the right to call scripts, the user could not release what plain commands acquire.
#[test]
fn a_user_who_may_not_call_scripts_acquires_nothing() {
    let f = fixture();
    f.acquire("makes the counter");
    f.say(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]);
    f.cut();
    for _ in 0..4 {
        f.acquire_within("k", LONG).1.unwrap_err();
    }
    assert_eq!(f.refused("k"), ErrorKind::Denied);
    assert!(!f.exists("k"));
}

/// The counter of a batch was missing, so the script repeats its grants.
#[test]
fn a_repeated_batch_counts_each_grant_once() {
    let f = warm();
    f.say(&["DEL", "p:~fence"]);
    let names = [0, 1, 2, 3, 4].map(|n| format!("n{n}"));
    let outcomes = f.execute(names.iter().map(|name| acquire_of(name)));
    let mut last = 0;
    for (name, outcome) in names.iter().zip(outcomes) {
        let Ok(Reply::Granted {
            token,
            is_token_in_value,
        }) = outcome
        else {
            panic!("{outcome:?}");
        };
        last = micros_of(token);
        let value = f.value(name).unwrap();
        assert!(
            is_token_in_value && value.contains(&last.to_string()),
            "{value}"
        );
    }
    assert_eq!(f.counter(), last);
}

/// The script has decided about the key, so no request for it can arrive later.
#[test]
fn a_refused_acquire_leaves_no_release() {
    let f = warm();
    f.say(&["SET", "p:~fence", "1795263780943818"]);
    for n in 0..20 {
        assert_eq!(f.refused(&format!("u{n}")), ErrorKind::Protocol);
    }
    // An undo would be repeated until the ttl has ended.
    assert!(eventually(LONG / 4, || {
        f.pipeline.run_maintenance();
        f.pipeline.failed_releases() == 0
    }));
}

/// A proxy that closes each connection on which it reads `closes_at`, and its count of connections.
fn closing_proxy(server: &Server, closes_at: &'static [u8]) -> (String, Arc<AtomicUsize>) {
    let upstream = server.port();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    // The threads end when the test's process ends, or both ends are closed.
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.unwrap();
            counter.fetch_add(1, Ordering::SeqCst);
            let redis = TcpStream::connect(("127.0.0.1", upstream)).unwrap();
            let (mut replies, mut to_client) =
                (redis.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut replies, &mut to_client));
            std::thread::spawn(move || {
                let (mut client, mut redis) = (client, redis);
                let mut chunk = [0; 1 << 16];
                while let Ok(n @ 1..) = client.read(&mut chunk) {
                    let bytes = &chunk[..n];
                    if bytes.windows(5).any(|word| word == closes_at) {
                        break;
                    }
                    redis.write_all(bytes).unwrap();
                }
                // An error means that the other end is closed.
                let _ = client.shutdown(Shutdown::Both);
                let _ = redis.shutdown(Shutdown::Both);
            });
        }
    });
    (url, connections)
}

#[test]
fn a_proxy_closing_at_multi_is_asked_thrice() {
    let server = Server::start().unwrap();
    let (url, _) = closing_proxy(&server, b"MULTI");
    let f = at(server, &url, LONG);
    let mut failed = 0;
    for n in 0..40 {
        failed += usize::from(f.acquire_within(&n.to_string(), LONG).1.is_err());
    }
    assert_eq!(f.refusals(), 1);
    // The reply of the script comes before the connection is closed, or is lost with it.
    assert!(failed <= 3, "{failed}");
}

#[test]
fn a_proxy_closing_at_delex_is_asked_thrice() {
    let server = Server::start().unwrap();
    let (url, connections) = closing_proxy(&server, b"DELEX");
    let f = at(server, &url, LONG);
    let mut failed = 0;
    for n in 0..10 {
        let release = f.held(&n.to_string());
        failed += usize::from(f.ask(release, LONG).is_err());
    }
    assert!(failed <= 3, "{failed}");
    assert_eq!(connections.load(Ordering::SeqCst), 4);
}

/// Redis refuses `MULTI` and `EXEC`, carries out the commands between them, and replies `EXECABORT`.
#[test]
fn a_key_that_was_set_without_a_transaction_is_known() {
    let f = warm();
    let rights = |change: &str| f.say(&["ACL", "SETUSER", "default", change]);
    for change in ["-multi", "-exec", "-@scripting"] {
        rights(change);
    }
    assert_eq!(f.refused("k"), ErrorKind::Denied);
    assert!(f.exists("k"));
    rights("+@scripting");
    assert!(eventually(LONG, || {
        f.pipeline.run_maintenance();
        !f.exists("k")
    }));
}

/// Plain commands have set the key, and then Redis refuses the script.
#[test]
fn a_set_key_is_released_if_the_script_fails() {
    let f = warm();
    f.say(&["DEL", "p:~fence"]);
    f.say(&["ACL", "SETUSER", "default", "-@scripting"]);
    assert_eq!(f.refused("k"), ErrorKind::Denied);
    assert!(f.exists("k"));
    f.say(&["ACL", "SETUSER", "default", "+@scripting"]);
    assert!(eventually(LONG, || {
        f.pipeline.run_maintenance();
        !f.exists("k")
    }));
}

#[test]
fn on_a_cluster_each_transaction_has_one_slot() {
    let server = Server::start().unwrap();
    let url = server.url();
    let f = with_layout(KeyLayout::Slots, server, &url, LONG);
    f.warm_up("warm-up");
    // At first, the slots have no fence counters.
    for (round, scripts) in [5, 0].into_iter().enumerate() {
        let before = f.used();
        let names = (0..20).map(|n| format!("{{{}}}{round}:{n}", n % 5));
        for outcome in f.execute(names.map(|name| acquire_of(&name))) {
            assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
        }
        assert_eq!(f.used_since(before), [5, scripts]);
    }
    let counters = f.say(&["KEYS", "p:~fence{*}"]);
    let leasehold_testbed::Reply::Array(counters) = counters else {
        panic!("{counters}");
    };
    assert_eq!(counters.len(), 7, "one for each slot");
}

#[test]
fn a_refusal_names_its_reason() {
    let reply = redis::parse_redis_value(
        b"-NOPERM User x has no permissions to run the 'multi' command\r\n",
    );
    let error = refusal::plain_refused(&reply.unwrap(), "host:1", "p:").to_string();
    assert!(
        error.contains("host:1") && error.contains("multi"),
        "{error}"
    );
}
