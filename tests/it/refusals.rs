//! Commands that a server, a proxy or an ACL refuses: locks work without the optional ones, and each error and event
//! names the command, the server's own text, and the next step.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use leasehold::{Client, Error, ErrorKind, EventHandler, Released};
use leasehold_testbed::{Reply, Server, eventually};

use crate::least_privilege::version;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, Witness, ask, notified_clients, script_calls, secs, server,
    wait_for_queue,
};

/// The texts of the errors of refusals.
#[derive(Default)]
struct Events {
    notifications: Mutex<Vec<String>>,
    plain_acquires: Mutex<Vec<String>>,
}

impl EventHandler for Events {
    fn notifications_refused(&self, error: &Error) {
        push(&self.notifications, error);
    }

    fn plain_acquires_refused(&self, error: &Error) {
        push(&self.plain_acquires, error);
    }
}

fn push(texts: &Mutex<Vec<String>>, error: &Error) {
    let mut texts = texts.lock().unwrap_or_else(PoisonError::into_inner);
    texts.push(error.to_string());
}

fn texts(texts: &Mutex<Vec<String>>) -> Vec<String> {
    texts.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

fn client(url: &str) -> Result<(Client, Arc<Events>), Error> {
    let events = Arc::<Events>::default();
    let builder = steady(url).ttl(LONG_TTL).event_handler(events.clone());
    Ok((builder.build()?, events))
}

/// A server that does not know `command`.
fn without(command: &str) -> Server {
    let server = Server::builder().arg("rename-command", format!("{command} \"\""));
    server.start().unwrap()
}

/// The number of clients that receive messages.
fn subscribed(server: &Server) -> usize {
    match ask(server, &["PUBSUB", "CHANNELS", "leasehold:~to:*"]) {
        Reply::Array(channels) => channels.len(),
        other => panic!("{other}"),
    }
}

fn released(guard: leasehold::MutexGuard) -> Result<(), Error> {
    match guard.unlock()? {
        Released::Unconfirmed(error) => Err(error),
        _ => Ok(()),
    }
}

/// Two clients lock one after the other, and one of them waits. Returns what the waiting client was told about its
/// notifications, which is something if `is_told`. Otherwise both clients must be notified.
fn lock_and_wait(server: &Server, url: &str, is_told: bool) -> Result<String, Error> {
    let (holder, _) = client(url)?;
    let (waiter, events) = client(url)?;
    released(holder.mutex("k").lock()?)?;
    let guard = holder.mutex("k").lock()?;
    let mutex = waiter.mutex("k");
    let waiting = Task::start(move || mutex.lock().and_then(released));
    // A waiter, and the holder of a lock that is held for some time, open notification connections.
    let told = || texts(&events.notifications).pop().unwrap_or_default();
    let is_decided = || match is_told {
        true => !told().is_empty(),
        false => notified_clients(server) == 2,
    };
    assert!(eventually(SOON, is_decided), "told {:?}", told());
    released(guard)?;
    waiting.within(SOON, "the waiter")?;
    Ok(told())
}

/// All of `parts` are in `text`.
#[track_caller]
fn assert_names(text: &str, parts: &[&str], what: &str) {
    for part in parts {
        assert!(text.contains(part), "{what}: no {part:?} in {text:?}");
    }
}

#[test]
fn locks_work_without_optional_commands() {
    const TRACKS_NOT: &str =
        "; until then, waiters are notified of their grants, but only renewals find lost locks";
    const POLLS: &str = "; until then, waiters poll, and renewals find lost locks";
    // Each command, and the parts of the event about notifications.
    let cases: [(&str, &[&str]); 13] = [
        ("EVAL", &[]),
        ("EVALSHA", &[]),
        ("SCRIPT", &[]),
        ("CLIENT", &["refuses CLIENT TRACKING during", TRACKS_NOT]),
        ("HELLO", &["refuses HELLO during", TRACKS_NOT]),
        ("SUBSCRIBE", &["refuses SUBSCRIBE during", POLLS]),
        ("PUBLISH", &["refuses PUBLISH during", POLLS]),
        ("PUBSUB", &[]),
        ("MULTI", &[]),
        ("EXEC", &[]),
        ("WAIT", &[]),
        ("CONFIG", &[]),
        ("SELECT", &[]),
    ];
    for (command, parts) in cases {
        let server = without(command);
        let told = lock_and_wait(&server, &server.url(), !parts.is_empty());
        let told = told.unwrap_or_else(|error| panic!("{command}: {error}"));
        assert_eq!(told.is_empty(), parts.is_empty(), "{command}: {told}");
        assert_names(&told, parts, command);
        if !parts.is_empty() {
            let common = [
                "the subscription to notifications: ERR unknown command",
                "; enable the command on the server",
            ];
            assert_names(&told, &common, command);
        }
    }
}

#[test]
fn scripts_are_sent_as_text_where_hashes_are_refused() {
    let server = without("EVALSHA");
    let (client, _) = client(&server.url()).unwrap();
    for key in ["a", "b", "c"] {
        for _ in 0..3 {
            released(client.mutex(key).lock().unwrap()).unwrap();
        }
    }
    assert!(server.calls("eval").unwrap() >= 3);
    // The calls of commands that the server does not know count as errors.
    let errors = ask(&server, &["INFO", "errorstats"]).to_string();
    let unknown = || {
        let (_, count) = errors.split_once("errorstat_ERR:count=")?;
        count.lines().next()?.trim().parse::<u64>().ok()
    };
    // CLIENT SETINFO (twice for each connection, before 7.2), DELEX, DELIFEQ and one EVALSHA.
    if version(&server) >= (7, 0) {
        let unknown = unknown().unwrap();
        let most = 5 * ask(&server, &["CLIENT", "LIST"])
            .as_text()
            .unwrap()
            .lines()
            .count() as u64;
        assert!(
            unknown <= most,
            "{unknown} unknown commands, {most} are usual"
        );
    }
    // Without SCRIPT LOAD, the first call of a script sends its text, and later calls send its hash.
    let server = without("SCRIPT");
    let (client, _) = self::client(&server.url()).unwrap();
    for key in ["a", "b", "c"] {
        for _ in 0..10 {
            released(client.mutex(key).lock().unwrap()).unwrap();
        }
    }
    // One call of each connection checks that scripts can be sent as text, and each of two scripts is sent once.
    let eval = server.calls("eval").unwrap();
    assert!(eval <= 6, "{eval} calls by text");
}

#[test]
fn a_required_command_is_named() {
    // Commands of scripts. The server does not say which of them it does not know.
    for command in ["SET", "ZADD", "TIME", "GETRANGE", "DEL"] {
        let server = without(command);
        let error = lock_and_wait(&server, &server.url(), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{command}: {error}");
        let parts = [
            "is refused: ERR Unknown Redis command called from",
            command,
            "rename-command",
            &server.port().to_string(),
        ];
        assert_names(&error.to_string(), &parts, command);
    }
    let server = Server::builder()
        .arg("rename-command", "EVAL \"\"")
        .arg("rename-command", "EVALSHA \"\"")
        .start()
        .unwrap();
    let (client, _) = client(&server.url()).unwrap();
    let error = client.mutex("k").lock().unwrap_err();
    assert_names(
        &error.to_string(),
        &["EVAL'", "ERR unknown command", "; enable the command"],
        "EVAL",
    );
    let server = Server::builder()
        .arg("rename-command", "EVAL \"\"")
        .arg("rename-command", "SCRIPT \"\"")
        .start()
        .unwrap();
    let error = Client::open(server.url()).unwrap_err();
    assert_names(
        &error.to_string(),
        &[
            "refuses EVAL during the loading of scripts: ERR unknown command",
            "; enable the command",
        ],
        "EVAL and SCRIPT",
    );
}

#[test]
fn calls_of_one_command_name_it() {
    let server = without("WATCH");
    let (client, _) = client(&server.url()).unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let error = guard.transaction(|_, _| Ok(())).map(drop).unwrap_err();
    assert_names(
        &error.to_string(),
        &["WATCH is refused: ERR unknown command", "; enable"],
        "WATCH",
    );
    let server = without("MULTI");
    let (client, events) = self::client(&server.url()).unwrap();
    for _ in 0..3 {
        released(client.mutex("k").lock().unwrap()).unwrap();
    }
    let told = || texts(&events.plain_acquires).pop().unwrap_or_default();
    assert!(eventually(SOON, || !told().is_empty()));
    assert_names(
        &told(),
        &[
            "a command of MULTI .. EXEC is refused: ERR unknown command",
            "MULTI",
            "; enable",
        ],
        "MULTI",
    );
    let guard = client.mutex("k").lock().unwrap();
    let error = guard.transaction(|_, _| Ok(())).map(drop).unwrap_err();
    assert_names(
        &error.to_string(),
        &["MULTI is refused: ERR unknown command", "; enable"],
        "MULTI",
    );
    let server = without("PING");
    let (client, _) = self::client(&server.url()).unwrap();
    let error = client.ping().unwrap_err();
    assert_names(
        &error.to_string(),
        &["PING is refused: ERR unknown command", "; enable"],
        "PING",
    );
    let server = without("CLUSTER");
    let error = Client::open(server.url().replace("redis:", "redis+cluster:")).unwrap_err();
    // The reply to HELLO shows before that it is no node of a Cluster.
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
    let server = without("SELECT");
    let error = Client::open(server.url() + "/1").unwrap_err();
    assert_names(
        &error.to_string(),
        &[
            "refuses SELECT during the login: ERR unknown command",
            "; enable",
        ],
        "SELECT",
    );
}

/// The users that people write. Which parts the error of a lock has (none if locks work), and which parts the event
/// about notifications has (none if there is no event).
#[test]
fn users_work_or_learn_which_right_is_missing() {
    type Case = (
        &'static [&'static str],
        &'static [&'static str],
        &'static [&'static str],
    );
    const TRACKING: &[&str] = &[
        "to call CLIENT TRACKING",
        "; add `+client|tracking` to",
        "waiters are notified",
    ];
    const CHANNEL: &[&str] = &[
        "does not allow user \"limited\" the channel of PUBLISH",
        "; add `&leasehold:~to:*` to",
        "waiters poll",
    ];
    const EVAL: &[&str] = &[
        "does not allow user \"limited\" to call EVAL during",
        "NOPERM",
        "; add `+eval` to",
    ];
    let cases: [Case; 17] = [
        (&["~*", "&*", "+@all"], &[], &[]),
        (&["~*", "resetchannels", "+@all"], &[], CHANNEL),
        (
            &["~leasehold:*", "&leasehold:*", "+@all", "-@admin"],
            &[],
            &[],
        ),
        (&["~*", "&*", "+@all", "-@dangerous"], &[], &[]),
        (&["~*", "&*", "+@all", "-script"], &[], &[]),
        (&["~*", "&*", "+@all", "-evalsha"], &[], &[]),
        (&["~*", "&*", "+@all", "-client"], &[], TRACKING),
        (&["~*", "&*", "+@all", "-@connection"], &[], TRACKING),
        (
            &["~*", "&*", "+@all", "-@pubsub"],
            &[],
            &["to call PUBLISH", "; add `+publish` to", "waiters poll"],
        ),
        (
            &["~*", "&*", "+@all", "-subscribe"],
            &[],
            &["to call SUBSCRIBE", "; add `+subscribe` to", "waiters poll"],
        ),
        (&["~*", "&*", "+@read", "+@write"], EVAL, &[]),
        (&["~*", "&*", "+@all", "-@scripting"], EVAL, &[]),
        (&["~*", "&*", "+@all", "-@slow"], EVAL, &[]),
        (&["~*", "&*", "+@read", "+@connection"], EVAL, &[]),
        (
            &["~app:*", "&*", "+@all"],
            &["NOPERM", "; add `~leasehold:*` to"],
            &[],
        ),
        (
            &["~*", "&*", "+@all", "-set"],
            &["the script Acquire is refused: ERR ", "set"],
            &[],
        ),
        (
            &["~*", "&*", "+@all", "-@write"],
            &["is refused: ERR ", "set"],
            &[],
        ),
    ];
    for (rules, error, event) in cases {
        let server = server();
        // CLIENT is dangerous in Redis 6.2.
        if version(&server) < (7, 0) && rules.contains(&"-@dangerous") {
            continue;
        }
        let user = ["ACL", "SETUSER", "limited", "reset", "on", ">secret"];
        ask(&server, &[&user, rules].concat());
        let url = format!("redis://limited:secret@127.0.0.1:{}", server.port());
        let what = format!("{rules:?}");
        match lock_and_wait(&server, &url, !event.is_empty()) {
            Ok(told) => {
                assert!(error.is_empty(), "{what}: locks work, {told}");
                assert_eq!(told.is_empty(), event.is_empty(), "{what}: {told}");
                assert_names(&told, event, &what);
            }
            Err(failed) => {
                assert!(!error.is_empty(), "{what}: {failed}");
                assert_eq!(failed.kind(), ErrorKind::Denied, "{what}: {failed}");
                assert_names(&failed.to_string(), error, &what);
            }
        }
    }
    let server = server();
    ask(
        &server,
        &[
            "ACL", "SETUSER", "limited", "off", ">secret", "~*", "&*", "+@all",
        ],
    );
    let url = format!("redis://limited:secret@127.0.0.1:{}", server.port());
    let error = Client::open(url).unwrap_err();
    assert_names(
        &error.to_string(),
        &["login of user \"limited\"", "or the user is disabled"],
        "off",
    );
}

#[test]
fn waiters_are_notified_without_tracking() {
    const CLIENTS: usize = 12;
    const TURNS: usize = 10;
    let by_acl = server();
    let user = [
        "ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-client",
    ];
    ask(&by_acl, &user);
    let url = format!("redis://limited:secret@127.0.0.1:{}", by_acl.port());
    let by_protocol = without("HELLO");
    let url_of_resp2 = by_protocol.url();
    for (server, url) in [(by_acl, url), (by_protocol, url_of_resp2)] {
        let clients: Vec<_> = (0..CLIENTS).map(|_| client(&url).unwrap()).collect();
        let holder = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
        let held = holder.mutex("k").lock().unwrap();
        let witness = Arc::new(Witness::default());
        let turns = |client: &Client| witness.start_turns(client.mutex("k"), TURNS);
        let tasks: Vec<_> = clients.iter().map(|(client, _)| turns(client)).collect();
        assert!(eventually(SOON, || subscribed(&server) == CLIENTS + 1));
        wait_for_queue(&server, "k", CLIENTS);
        // Each waiter is in the queue as one that is notified: an entry of a waiter that polls has the ttl 0.
        let ask_all = || ask(&server, &["ZRANGE", "leasehold:~queue:k", "0", "-1"]).to_string();
        assert!(
            eventually(SOON, || !ask_all().contains(",0,")),
            "{}",
            ask_all()
        );
        let (before, began) = (script_calls(&server), std::time::Instant::now());
        held.unlock().unwrap();
        for task in tasks {
            task.within(secs(60), "all turns");
        }
        let (calls, grants) = (script_calls(&server) - before, (CLIENTS * TURNS) as u64);
        // A turn takes a request to join the queue and a release. Eight waiters ask once a second. Polling takes a
        // request of each waiter every few milliseconds.
        let of_seconds = 10 * (began.elapsed().as_secs() + 1);
        assert!(
            calls <= 4 * grants + of_seconds,
            "{calls} calls for {grants} grants"
        );
        for (_, events) in &clients {
            assert_eq!(
                texts(&events.notifications).len(),
                1,
                "{:?}",
                texts(&events.notifications)
            );
        }
    }
}

/// Starts a proxy to `server` that closes each connection at `command`, after it has passed on the replies to all
/// earlier commands. Returns its URL.
fn closing_at(server: &Server, command: &'static str) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let to = server.port();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || relay_until(client, to, command));
        }
    });
    url
}

fn relay_until(mut client: TcpStream, to: u16, command: &str) {
    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)) else {
        return;
    };
    let (mut from, mut into) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut into);
        let _ = into.shutdown(Shutdown::Both);
    });
    let word = format!("\r\n${}\r\n{command}\r\n", command.len());
    let mut buffer = [0; 64 * 1024];
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let bytes = &buffer[..count];
        let found = bytes
            .windows(word.len())
            .position(|it| it == word.as_bytes());
        // The command begins with the number of its words, such as `*3`.
        let start = found.map(|at| {
            bytes[..at]
                .iter()
                .rposition(|byte| *byte == b'*')
                .unwrap_or(0)
        });
        if server.write_all(&bytes[..start.unwrap_or(count)]).is_err() {
            return;
        }
        if start.is_some() {
            // The server answers what it has got, and closes.
            let _ = server.shutdown(Shutdown::Write);
            return;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
}

#[test]
fn a_closed_connection_names_the_command() {
    let server = server();
    for (command, part) in [
        (
            "CLIENT",
            "closed the connection during the login, after CLIENT SETINFO; ",
        ),
        (
            "SCRIPT",
            "closed the connection during the loading of scripts, after SCRIPT EXISTS; ",
        ),
    ] {
        let error = Client::builder(closing_at(&server, command)).connect_timeout(secs(2));
        let error = error.build().unwrap_err();
        assert_names(
            &error.to_string(),
            &[part, "if it is a proxy that does not know"],
            command,
        );
    }
    let (client, _) = client(&closing_at(&server, "WATCH")).unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let error = guard.transaction(|_, _| Ok(())).map(drop).unwrap_err();
    assert_names(
        &error.to_string(),
        &["broke before the reply to WATCH"],
        "WATCH",
    );
    released(guard).unwrap();
    let (client, _) = self::client(&closing_at(&server, "EVALSHA")).unwrap();
    let error = client.mutex("new").inspect().unwrap_err();
    assert_names(
        &error.to_string(),
        &["broke before the reply to EVALSHA"],
        "EVALSHA",
    );
    let (client, events) = self::client(&closing_at(&server, "SUBSCRIBE")).unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let told = || texts(&events.notifications).pop().unwrap_or_default();
    assert!(eventually(SOON, || !told().is_empty()));
    let part = "closed the connection during the subscription to notifications, after SUBSCRIBE; ";
    assert_names(&told(), &[part, "waiters poll"], "SUBSCRIBE");
    released(guard).unwrap();
}
