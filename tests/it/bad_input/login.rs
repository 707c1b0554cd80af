//! Refused logins: wrong and missing passwords, users without permissions, databases that do not exist.

use std::sync::{Arc, mpsc};

use leasehold::{Error, ErrorKind, EventHandler};
use leasehold_testbed::{Reply, Server};

use crate::steady::steady;
use crate::support::{SOON, Task, ask, builder, held_keys, lock, server, within};

use super::{all_texts, assert_all_fail, errors_of, hasty};
use crate::fakes::{Fake, Manner};

const PASSWORD: &str = "corréct/horse@battery";

fn locked_server() -> Server {
    Server::builder().password(PASSWORD).start().unwrap()
}

#[test]
fn the_right_password_opens() {
    let server = locked_server();
    let client = steady(&server.url()).build().unwrap();
    client.with_lock("k", || ()).unwrap();
}

#[test]
fn a_wrong_password_is_denied_and_hidden() {
    let server = locked_server();
    for login in ["wr0ng", "nobody:wr0ng", "default:wr0ng"] {
        let login = login.replacen("wr0ng", ":wr0ng", usize::from(!login.contains(':')));
        let url = format!("redis://{login}@127.0.0.1:{}", server.port());
        for (what, error) in errors_of(&url) {
            assert_eq!(error.kind(), ErrorKind::Denied, "{what}: {error}");
            let text = all_texts(&error);
            assert!(!text.contains("wr0ng"), "{what}: {text}");
        }
    }
}

#[test]
fn a_missing_password_is_denied() {
    let server = locked_server();
    assert_all_fail(
        ErrorKind::Denied,
        &format!("redis://127.0.0.1:{}", server.port()),
    );
}

/// The URL of a new user with these permissions.
fn user(server: &Server, permissions: &[&str]) -> String {
    let command = ["ACL", "SETUSER", "limited", "reset", "on", ">secret"];
    ask(server, &[&command, permissions].concat());
    format!("redis://limited:secret@127.0.0.1:{}", server.port())
}

#[test]
fn a_user_without_scripts_is_denied() {
    let server = server();
    let url = user(&server, &["~*", "+@all", "-script", "-eval"]);
    assert_all_fail(ErrorKind::Denied, &url);
}

#[test]
fn a_user_without_script_exists_can_lock() {
    let server = server();
    let url = user(&server, &["~*", "&*", "+@all", "-script", "+script|load"]);
    let client = steady(&url).build().unwrap();
    client.with_lock("k", || ()).unwrap();
    assert_eq!(server.calls("script|exists").unwrap(), 0);
}

#[test]
fn acquires_without_permission_are_denied() {
    let server = server();
    for missing in [
        &["~*", "+@all", "-eval", "-evalsha"][..],
        &["~other:*", "+@all"],
        &["~*", "+@all", "-set"],
        &["~*", "+@all", "-zscore", "-zadd"],
    ] {
        let client = hasty(&user(&server, missing)).build_lazy().unwrap();
        for error in [
            client.mutex("k").lock().unwrap_err(),
            client.mutex("k").try_lock().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Denied, "{missing:?}: {error}");
        }
        assert_eq!(held_keys(&server), Vec::<String>::new(), "{missing:?}");
    }
}

#[test]
fn a_held_lock_without_read_permission_is_denied() {
    let server = server();
    let holder = steady(&server.url()).build().unwrap();
    let guard = lock(&holder, "k");
    // The user may read the counter of tokens, but no lock. Redis 6.2 has no selectors: there, the user may read
    // neither.
    let selector = "(+getrange ~leasehold:~*)";
    let tried = ["ACL", "SETUSER", "tried", selector];
    let knows_selectors = !matches!(server.command(&tried).unwrap(), Reply::Error(_));
    let mut permissions = vec!["~leasehold:*", "&*", "+@all", "-getrange"];
    permissions.extend(knows_selectors.then_some(selector));
    let client = hasty(&user(&server, &permissions)).build_lazy().unwrap();
    if knows_selectors {
        assert!(client.mutex("free").try_lock().unwrap().is_some());
    }
    let error = client.mutex("k").try_lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    guard.unlock().unwrap();
}

#[test]
fn reads_without_permission_are_denied() {
    let server = server();
    let holder = steady(&server.url()).build().unwrap();
    let guard = holder.mutex("k").lock().unwrap();
    for missing in ["-getrange", "-pttl", "-hstrlen"] {
        let client = hasty(&user(&server, &["~*", "+@all", missing]));
        let client = client.build_lazy().unwrap();
        let value = client.fenced_value("v");
        let error = match missing {
            "-hstrlen" => value.read().unwrap_err(),
            _ => client.mutex("k").inspect().unwrap_err(),
        };
        assert_eq!(error.kind(), ErrorKind::Denied, "{missing}: {error}");
    }
    guard.unlock().unwrap();
}

/// If a script raises the error of a command, Redis wraps the error's text.
#[test]
fn a_transaction_script_without_permission_is_denied() {
    const RAISES: &str = "return redis.call('INCR', KEYS[1])";
    let server = server();
    let client = hasty(&user(&server, &["~*", "&*", "+@all", "-incr"]));
    let client = client.build_lazy().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let mut eval = redis::cmd("EVAL");
    eval.arg(RAISES).arg(1).arg("number");
    let error = guard
        .transaction(|connection, _| eval.query::<i64>(connection))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let allowed = steady(&server.url()).build().unwrap();
    let guard = allowed.mutex("l").lock().unwrap();
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    let error = guard
        .transaction(|connection, _| eval.query::<i64>(connection))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[test]
fn a_database_out_of_range_is_invalid_config() {
    let server = server();
    for (what, error) in errors_of(&format!("{}/4711", server.url())) {
        let text = all_texts(&error);
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{what}: {text}");
        assert!(error.to_string().contains("4711"), "{what}: {error}");
    }
    let negative = hasty(&format!("{}/-1", server.url())).build().unwrap_err();
    assert_eq!(negative.kind(), ErrorKind::InvalidConfig, "{negative}");
    let last = steady(&format!("{}/15", server.url())).build().unwrap();
    let first = steady(&format!("{}/0", server.url())).build().unwrap();
    let guard = last.mutex("k").lock().unwrap();
    assert!(
        first.mutex("k").try_lock().unwrap().is_some(),
        "the databases share the lock"
    );
    guard.unlock().unwrap();
}

/// Redis repeats the arguments of an unknown command in its error.
#[test]
fn a_refused_hello_does_not_show_the_password() {
    let server = Server::builder()
        .arg("rename-command", "HELLO \"\"")
        .start()
        .unwrap();
    for login in ["user:hunter2", ":hunter2"] {
        let url = format!("redis://{login}@127.0.0.1:{}?protocol=resp3", server.port());
        for (what, error) in errors_of(&url) {
            let text = all_texts(&error);
            assert!(!text.contains("hunter2"), "{what}: {text}");
        }
    }
}

#[test]
fn a_login_repeated_in_errors_is_hidden() {
    let fake = Fake::start(Manner::Echoing);
    for login in ["user:hunter2", ":hunter2", ":hunter2%0A", "user:hunter2%22"] {
        for protocol in ["", "?protocol=resp3"] {
            let url = fake.url().replace("//", &format!("//{login}@")) + protocol;
            for (what, error) in errors_of(&url) {
                let text = all_texts(&error);
                assert!(!text.contains("hunter2"), "{what} {url}: {text}");
            }
        }
    }
}

#[test]
fn a_refused_database_does_not_show_the_password() {
    let fake = Fake::start(Manner::EchoingLater);
    for protocol in ["", "?protocol=resp3"] {
        let url = fake.url().replace("//", "//:hunter2@") + "/3" + protocol;
        for (what, error) in errors_of(&url) {
            let text = all_texts(&error);
            assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{what}: {text}");
            assert!(!text.contains("hunter2"), "{what} {url}: {text}");
        }
    }
}

#[test]
fn a_missing_password_does_not_show_the_user() {
    let server = locked_server();
    let url = format!("redis://hunter2@127.0.0.1:{}", server.port());
    let error = steady(&url).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let text = all_texts(&error);
    assert!(!text.contains("hunter2"), "{text}");
}

struct Refusals(mpsc::Sender<Error>);

impl EventHandler for Refusals {
    fn notifications_refused(&self, error: &Error) {
        let _ = self.0.send(error.clone());
    }
}

#[test]
fn refused_notifications_do_not_show_the_password() {
    let server = Server::builder()
        .password("hunter2")
        .arg("rename-command", "HELLO \"\"")
        .start()
        .unwrap();
    let (sender, refusals) = mpsc::channel();
    let client = builder(&server.url())
        .event_handler(Arc::new(Refusals(sender)))
        .build();
    let client = client.unwrap();
    let guard = lock(&client, "k");
    let waiting = Task::start(move || client.mutex("k").lock().map(drop));
    let error = within(SOON, "the refusal", move || refusals.recv().unwrap());
    let text = all_texts(&error);
    // Valkey 9 asks for the password before it looks for the command.
    let is_refused = text.contains("HELLO") || text.contains("NOAUTH");
    assert!(is_refused && !text.contains("hunter2"), "{text}");
    drop(guard);
    waiting.within(SOON, "the waiter").unwrap();
}

#[test]
fn an_unknown_command_does_not_show_the_lease() {
    let server = server();
    let client = builder(&server.url()).prefix("p").build().unwrap();
    let ticket = lock(&client, "k").into_ticket().unwrap();
    let lease = ticket.split(' ').nth(1).unwrap().to_owned();
    let renamed = Server::builder()
        .arg("rename-command", "EVALSHA \"\"")
        .arg("rename-command", "EVAL \"\"")
        .start()
        .unwrap();
    let client = builder(&renamed.url()).prefix("p").build().unwrap();
    let text = all_texts(&client.adopt(&ticket).unwrap_err());
    assert!(
        text.contains("unknown command 'EVAL'") || text.contains("unknown command `EVAL`"),
        "{text}"
    );
    assert!(!text.contains(&lease[..16]), "{text}");
}
