//! The whole messages of errors that a wrong address or setting causes: the server, the fault, and the next step.

use std::error::Error as _;
use std::io::{Read, Write};
use std::net::TcpStream;

use leasehold::{Client, Error};
use leasehold_testbed::{SentinelGroup, Server, eventually};

use crate::fakes::{Fake, Manner, closed_port};
use crate::steady::steady;
use crate::support::{SOON, ask, millis, secs, server, within};

/// Fails unless `error` has this message, in which `ADDR` stands for the address of `url`, and `TIME` for the seconds of
/// an outage. Fails if the message repeats the text of a source.
#[track_caller]
pub fn assert_says(error: &Error, url: &str, message: &str) {
    let address = url.rsplit('/').next().unwrap().rsplit('@').next().unwrap();
    let shown = error.to_string();
    let mut message = message.replace("ADDR", address);
    if message.contains("TIME") {
        let lasted = shown
            .split(": for ")
            .nth(1)
            .and_then(|it| it.split(" s: ").next());
        let lasted = lasted.expect("the message has the time of the outage");
        assert!(lasted.parse::<f64>().is_ok(), "{shown}");
        message = message.replace("TIME", lasted);
    }
    assert_eq!(shown, message);
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        assert!(!shown.contains(&text), "{shown:?} repeats {text:?}");
        source = cause.source();
    }
}

/// As [`assert_says`], for the error of `build` with `url`.
#[track_caller]
fn assert_opening_says(url: &str, message: &str) {
    let error = steady(url).build().unwrap_err();
    assert_says(&error, url, message);
}

#[test]
fn logins_say_what_is_refused() {
    let server = Server::builder().password("secret").start().unwrap();
    let port = server.port();
    assert_opening_says(
        &format!("redis://127.0.0.1:{port}"),
        "Redis denies access: ADDR refuses the login without a password; put it into the URL \
         (redis://user:password@host), or give it with `Builder::credentials`",
    );
    for (login, user) in [(":wr0ng", "default"), ("me:wr0ng", "me")] {
        for protocol in ["", "?protocol=resp3"] {
            let url = format!("redis://{login}@127.0.0.1:{port}");
            let error = steady(&format!("{url}{protocol}")).build().unwrap_err();
            let message = format!(
                "Redis denies access: ADDR refuses the login of user {user:?}: user or password is wrong; check both"
            );
            assert_says(&error, &url, &message);
        }
    }
    let open = crate::support::server();
    assert_opening_says(
        &format!("redis://:secret@127.0.0.1:{}", open.port()),
        "Redis denies access: ADDR refuses the login; check user and password, and that the \
         server has them",
    );
}

#[test]
fn a_missing_permission_is_named() {
    let server = server();
    let user = |rights: &[&str]| {
        let command = ["ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*"];
        ask(&server, &[&command, rights].concat());
        format!("redis://limited:secret@127.0.0.1:{}", server.port())
    };
    assert_opening_says(
        &user(&["+@all", "-script"]),
        "Redis denies access: ADDR does not allow user \"limited\" to call SCRIPT LOAD; allow what \
         docs/redis.md lists under Rights",
    );
    let url = user(&["+@all", "-evalsha", "-eval"]);
    let error = steady(&url).build().unwrap().mutex("k").lock();
    let shown = error.map(drop).unwrap_err().to_string();
    let start = format!(
        "Redis denies access (\"k\"): 127.0.0.1:{}: NOPERM",
        server.port()
    );
    let next = "; allow what docs/redis.md lists under Rights";
    assert!(shown.starts_with(&start), "{shown}");
    assert!(shown.ends_with(next), "{shown}");
    // A right that scripts need, and one that transactions need.
    for denied in ["-set", "-watch"] {
        let client = steady(&user(&["+@all", denied])).build().unwrap();
        let guard = client.mutex("k").lock();
        let error = guard.and_then(|guard| guard.transaction(|_, _| Ok(())).map(drop));
        let shown = error.unwrap_err().to_string();
        let address = format!("127.0.0.1:{}: ", server.port());
        assert!(shown.contains(&address), "{denied}: {shown}");
        assert!(
            shown.ends_with("; allow what docs/redis.md lists under Rights"),
            "{shown}"
        );
    }
}

#[test]
fn a_refused_wait_names_the_right() {
    let server = server();
    let user = ["ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*"];
    ask(&server, &[&user[..], &["+@all", "-wait"]].concat());
    let url = format!("redis://limited:secret@127.0.0.1:{}", server.port());
    let client = steady(&url).replicas(1, millis(50)).build().unwrap();
    let shown = client.mutex("k").try_lock().map(drop);
    let shown = shown.unwrap_err().to_string();
    let start = "Redis denies access (\"k\"): ";
    let next = "; allow `replicas` of `cargo xtask acl`";
    assert!(shown.starts_with(start) && shown.ends_with(next), "{shown}");
}

#[test]
fn an_outage_is_named_once_with_its_reason() {
    let port = closed_port();
    let client = steady(&format!("redis://127.0.0.1:{port}")).outage_timeout(millis(100));
    let error = client.build_lazy().unwrap().mutex("k").lock();
    let shown = error.map(drop).unwrap_err().to_string();
    let start = "Redis is unavailable (\"k\"): for ";
    let end = format!(
        " s: 127.0.0.1:{port} refuses connections; check that Redis runs there, and the port"
    );
    assert!(shown.starts_with(start) && shown.ends_with(&end), "{shown}");
    assert_eq!(shown.matches("unavailable").count(), 1, "{shown}");
}

#[test]
fn a_server_that_hangs_is_named() {
    let server = server();
    let client = steady(&server.url()).command_timeout(secs(1));
    let client = client.build().unwrap();
    client.with_lock("k", || ()).unwrap();
    server.stop();
    let mutex = client.mutex("k");
    let error = within(SOON, "a try", move || mutex.try_lock().map(drop));
    assert_says(
        &error.unwrap_err(),
        &server.url(),
        "no reply from Redis in time, the outcome is unknown (\"k\"): ADDR did not reply within \
         `command_timeout`; check the server's load and the network",
    );
    let error = super::hasty(&server.url()).build().unwrap_err();
    assert_says(
        &error,
        &server.url(),
        "Redis is unavailable: ADDR did not answer the login within 300ms (`connect_timeout`); \
         check the server's load and the network",
    );
    server.resume();
}

#[test]
fn a_closed_connection_is_named() {
    let fake = Fake::start(Manner::Closing);
    let shown = steady(&fake.url()).build().unwrap_err().to_string();
    let end = "during the login; check the server's log, and use rediss:// if this is its TLS port";
    assert!(
        shown.contains("127.0.0.1:") && shown.ends_with(end),
        "{shown}"
    );
}

#[test]
fn a_server_that_refuses_connections_says_why() {
    let server = Server::builder().arg("maxclients", "1").start().unwrap();
    // This connection is the only one that the server accepts, once it has closed the connections with which the
    // testbed started it.
    let mut only = None;
    let accepted = eventually(SOON, || {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.write_all(b"PING\r\n").unwrap();
        let mut reply = [0; 7];
        let replied = stream.read_exact(&mut reply).is_ok() && &reply == b"+PONG\r\n";
        only = Some(stream);
        replied
    });
    assert!(accepted);
    assert_opening_says(
        &server.url(),
        "Redis is unavailable: ADDR accepts no more connections; close some, or raise its `maxclients`",
    );
    drop(only);
    let fake = Fake::start(Manner::Protected);
    assert_opening_says(
        &fake.url(),
        "Redis denies access: ADDR is in protected mode; set a password there, or bind it to one \
         address",
    );
}

#[test]
fn a_port_where_nothing_listens_is_named() {
    assert_opening_says(
        &format!("redis://127.0.0.1:{}", closed_port()),
        "Redis is unavailable: ADDR refuses connections; check that Redis runs there, and the port",
    );
}

#[test]
fn a_socket_that_does_not_exist_is_named() {
    let error = steady("unix:///nowhere/at/all.sock").build().unwrap_err();
    let message = "Redis is unavailable: /nowhere/at/all.sock does not exist; check the path of the \
         socket, and that Redis runs";
    assert_eq!(error.to_string(), message);
}

#[test]
fn a_host_without_an_address_is_named() {
    assert_opening_says(
        "redis://nowhere.invalid:6379",
        "Redis is unavailable: ADDR cannot be reached: its host name has no address; check the \
         name, and DNS",
    );
}

#[test]
fn a_server_that_is_no_redis_is_named() {
    let fake = Fake::start(Manner::Http);
    assert_opening_says(
        &fake.url(),
        "unexpected data: ADDR does not answer as Redis does; check the host and the port",
    );
}

#[test]
fn a_database_that_does_not_exist_is_named() {
    let server = server();
    let error = steady(&format!("{}/4711", server.url())).build();
    assert_says(
        &error.unwrap_err(),
        &server.url(),
        "invalid configuration: ADDR has no database 4711; check the number behind the last / of \
         the URL",
    );
}

#[test]
fn a_node_of_a_cluster_is_named() {
    let server = Server::builder().arg("cluster-enabled", "yes").start();
    let server = server.unwrap();
    let message = format!(
        "invalid configuration: ADDR is a node of a Redis Cluster; use the URL \
         redis+cluster://127.0.0.1:{}",
        server.port()
    );
    assert_opening_says(&server.url(), &message);
    // With RESP3, the reply is a map.
    let error = Client::open(format!("{}?protocol=resp3", server.url()));
    assert_says(&error.unwrap_err(), &server.url(), &message);
}

#[test]
fn a_sentinel_is_named() {
    let group = SentinelGroup::builder().replicas(0).sentinels(1);
    let group = group.start().unwrap();
    assert_opening_says(
        &group.sentinels()[0].url(),
        "invalid configuration: ADDR is a sentinel; use redis+sentinel://host:port/name, with the \
         name of the group that it watches",
    );
}

#[test]
#[cfg(not(feature = "tls"))]
fn a_url_with_tls_names_the_feature() {
    let error = Client::open("rediss://127.0.0.1").unwrap_err();
    assert_eq!(
        error.to_string(),
        "invalid configuration: url: asks for TLS, which needs leasehold's cargo feature `tls`; \
         enable it in Cargo.toml"
    );
}
