//! `Builder::credentials`: a callback returns the login of each connection.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use leasehold::{Builder, Client, Credentials, ErrorKind, MemoryStore};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    SOON, Task, ask, builder, kill_connections, lock, millis, notified_clients, secs,
    wait_for_queue,
};

use super::all_texts;
use super::messages::assert_says;

const TOKENS: [&str; 2] = ["t0ken-one", "t0ken-two"];

/// A server that requires `password`, and the server's URL without a login.
fn locked_server(password: &str) -> (Server, String) {
    let server = Server::builder().password(password).start().unwrap();
    let url = format!("redis://127.0.0.1:{}", server.port());
    (server, url)
}

#[test]
fn each_connection_calls_the_credentials_callback() {
    let (server, url) = locked_server("admin");
    let allow = |password: &str| {
        let command = ["ACL", "SETUSER", "me", "reset", "on", "~*", "&*", "+@all"];
        ask(
            &server,
            &[&command[..], &[&format!(">{password}")]].concat(),
        );
    };
    allow(TOKENS[0]);
    let token = Arc::new(Mutex::new(TOKENS[0]));
    let (calls, current) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&token));
    let counter = Arc::clone(&calls);
    let client = steady(&url).credentials(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        let token = *current.lock().unwrap();
        Ok(Credentials::user("me", token))
    });
    let client = client.build().unwrap();
    client.with_lock("k", || ()).unwrap();
    // The old token is no longer accepted. The notification connection uses the new token, too.
    *token.lock().unwrap() = TOKENS[1];
    allow(TOKENS[1]);
    kill_connections(&server);
    let before = calls.load(Ordering::Relaxed);
    let guard = lock(&client, "k");
    let mutex = client.mutex("k");
    let waiter = Task::start(move || {
        let locked = mutex.try_lock_for(2 * SOON);
        locked.map(|guard| guard.is_some())
    });
    let other = steady(&server.url()).build().unwrap();
    let mutex = other.mutex("k");
    let second = Task::start(move || mutex.lock().map(drop));
    wait_for_queue(&server, "k", 1);
    drop(guard);
    assert!(waiter.within(SOON, "the lock").unwrap());
    second.within(SOON, "the lock").unwrap();
    assert!(calls.load(Ordering::Relaxed) > before);
}

/// The error of `build`, and the error of `lock` of a client that was built without connecting.
fn errors_of(builder: impl Fn() -> Builder) -> [leasehold::Error; 2] {
    let lazy = builder().outage_timeout(millis(1)).build_lazy().unwrap();
    [
        builder().build().unwrap_err(),
        lazy.mutex("k").lock().unwrap_err(),
    ]
}

#[test]
fn a_callback_that_fails_or_panics_is_unavailable() {
    const FAILED: &str = "ADDR: the callback of `Builder::credentials` has failed; check where it gets the login (the \
         source of this error has the reason)";
    const PANICKED: &str = "ADDR: the callback of `Builder::credentials` has panicked; correct it";
    let (_server, url) = locked_server(TOKENS[0]);
    let failing = errors_of(|| steady(&url).credentials(|| Err("no token today".into())));
    let panicking = errors_of(|| steady(&url).credentials(|| panic!("the test's panic")));
    for (errors, what) in [(&failing, FAILED), (&panicking, PANICKED)] {
        let [built, locked] = errors;
        assert_says(built, &url, &format!("Redis is unavailable: {what}"));
        let message = format!("Redis is unavailable (\"k\"): for TIME s: {what}");
        assert_says(locked, &url, &message);
    }
    for error in failing {
        assert!(all_texts(&error).contains("no token today"), "{error}");
    }
}

/// The failed acquire and the notification connection have tried to connect several times.
#[test]
fn no_callback_is_called_while_the_server_is_away() {
    let (mut server, url) = locked_server(TOKENS[0]);
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let client = steady(&url)
        .command_timeout(secs(2))
        .outage_timeout(millis(300))
        .credentials(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(Credentials::password(TOKENS[0]))
        });
    let client = client.build().unwrap();
    // The notification connection is open, too.
    let guard = lock(&client, "k");
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    server.kill();
    let before = calls.load(Ordering::Relaxed);
    assert!(before >= 2, "{before}");
    let error = client.mutex("other").lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(calls.load(Ordering::Relaxed), before);
    drop(guard);
    server.restart().unwrap();
    let mutex = client.mutex("other");
    assert!(eventually(SOON, || mutex.try_lock().is_ok()));
    assert!(calls.load(Ordering::Relaxed) > before);
}

#[test]
fn the_time_of_a_callback_does_not_count() {
    let (server, url) = locked_server(TOKENS[0]);
    let client = builder(&url)
        .connect_timeout(secs(2))
        .command_timeout(secs(2));
    let client = client.credentials(|| {
        std::thread::sleep(millis(2_500));
        Ok(Credentials::password(TOKENS[0]))
    });
    let client = client.build().unwrap();
    let _guard = lock(&client, "k");
    assert!(eventually(SOON, || notified_clients(&server) == 1));
}

#[test]
fn a_refused_token_is_not_shown() {
    let (_server, url) = locked_server(TOKENS[0]);
    for error in errors_of(|| {
        let builder = steady(&url);
        builder.credentials(|| Ok(Credentials::user("me", "wr0ng-token")))
    }) {
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        let text = all_texts(&error);
        assert!(!text.contains("wr0ng") && text.contains("\"me\""), "{text}");
    }
    let builder = steady(&url).credentials(|| Ok(Credentials::password(TOKENS[0])));
    let mut shown = format!("{builder:?}");
    shown += &format!("{:?}", builder.build().unwrap());
    assert!(!shown.contains(TOKENS[0]), "{shown}");
}

#[test]
fn a_callback_beside_a_login_is_refused() {
    for login in ["me:secret@", ":secret@", "me@"] {
        let builder = steady(&format!("redis://{login}127.0.0.1:1"));
        let builder = builder.credentials(|| Ok(Credentials::password("x")));
        let error = builder.build_lazy().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        assert!(error.to_string().contains("credentials"), "{error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[test]
fn a_callback_for_a_memory_store_is_refused() {
    for builder in [
        Client::builder("memory://refused"),
        MemoryStore::new().builder(),
    ] {
        let error = builder
            .credentials(|| Ok(Credentials::password("x")))
            .build()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        assert!(error.to_string().contains("credentials"), "{error}");
    }
}

/// Dropping the error of a callback runs user code. No mutex of the library is locked then.
#[test]
fn dropping_a_callbacks_error_may_use_the_client() {
    struct UsesClient(Arc<Mutex<Option<Client>>>);
    impl fmt::Debug for UsesClient {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("UsesClient")
        }
    }
    impl fmt::Display for UsesClient {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("no token")
        }
    }
    impl std::error::Error for UsesClient {}
    impl Drop for UsesClient {
        fn drop(&mut self) {
            let client = self.0.lock().unwrap().clone();
            if let Some(client) = client {
                let _ = client.mutex("of-the-error").try_lock_for(millis(1));
            }
        }
    }
    let server = Server::start().unwrap();
    let used = Arc::new(Mutex::new(None));
    let of_callback = Arc::clone(&used);
    let url = format!("redis://127.0.0.1:{}", server.port());
    let client = steady(&url)
        .connect_timeout(millis(300))
        .credentials(move || Err(Box::new(UsesClient(Arc::clone(&of_callback)))))
        .build_lazy()
        .unwrap();
    *used.lock().unwrap() = Some(client.clone());
    for _ in 0..3 {
        let client = client.clone();
        let locked = Task::start(move || client.mutex("k").try_lock_for(millis(600)));
        let error = locked
            .within(SOON, "the error of the callback")
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    // Drops the client that the callback owns. Otherwise the client and its callback would keep each other alive.
    *used.lock().unwrap() = None;
}

#[test]
fn a_callback_may_use_another_client() {
    let (server, url) = locked_server(TOKENS[0]);
    let other = Arc::new(steady(&server.url()).build().unwrap());
    let client = steady(&url).credentials(move || {
        let token = other.with_lock("token", || TOKENS[0])?;
        Ok(Credentials::password(token))
    });
    client.build().unwrap().with_lock("k", || ()).unwrap();
}
