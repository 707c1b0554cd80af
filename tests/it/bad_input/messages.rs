//! The whole messages of errors that a wrong address or setting causes: the server, the fault, and the next step.

use std::error::Error as _;
use std::io::{Read, Write};
use std::net::TcpStream;

use leasehold::{Client, Credentials, Error};
use leasehold_testbed::{Cluster, SentinelGroup, Server, eventually};

use super::unfinished::full_backlog;
use crate::cluster::key_on;
use crate::fakes::{Fake, Manner, closed_port};
use crate::steady::steady;
use crate::support::{SOON, ask, millis, secs, server, within};

/// Fails unless `error` has this message, in which `ADDR` stands for the address of `url`, and `TIME` for the seconds
/// of an outage. Fails if the message repeats the text of a source.
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
                "Redis denies access: ADDR refuses the login of user {user:?}: user or password is wrong, or the \
                 user is disabled; check them"
            );
            assert_says(&error, &url, &message);
        }
    }
    let open = crate::support::server();
    let message = format!(
        "Redis denies access: ADDR refuses the login: {}; check user and password, and that the server has them",
        refusal(&open.url(), &["AUTH", "secret"])
    );
    assert_opening_says(
        &format!("redis://:secret@127.0.0.1:{}", open.port()),
        &message,
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
    let url = user(&["+@all", "-script", "-eval"]);
    let message = format!(
        "Redis denies access: ADDR does not allow user \"limited\" to call EVAL during the loading of scripts: {}; add \
         `+eval` to the user's ACL rule (docs/redis.md, Rights)",
        refusal(&url, &["EVAL", "return 1", "0"])
    );
    assert_opening_says(&url, &message);
    // A right to scripts, and one that transactions need.
    for (rights, refused, what, next) in [
        (
            &["+@all", "-evalsha", "-eval"][..],
            &["EVAL", "0", "0"][..],
            "the script Acquire",
            "add `+eval` to the user's ACL rule (docs/redis.md, Rights)",
        ),
        (
            &["+@all", "-watch"],
            &["WATCH", "k"],
            "WATCH",
            "add `+watch` to the user's ACL rule (docs/redis.md, Rights)",
        ),
    ] {
        let url = user(rights);
        let guard = steady(&url).build().unwrap().mutex("k").lock();
        let error = guard.and_then(|guard| guard.transaction(|_, _| Ok(())).map(drop));
        let message = format!(
            "Redis denies access (\"k\"): ADDR: {what} is refused: {}; {next}",
            refusal(&url, refused)
        );
        assert_says(&error.unwrap_err(), &url, &message);
    }
}

/// The error reply of the server at `url` to a command, whose text is another one in each version of Redis.
fn refusal(url: &str, command: &[&str]) -> String {
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    let error = redis::cmd(command[0])
        .arg(&command[1..])
        .exec(&mut connection);
    let error = error.unwrap_err();
    let text = format!("{} {}", error.code().unwrap(), error.detail().unwrap());
    let text = text.trim_end_matches('.');
    // Redis 6.2 names the line of the script, and no code.
    match text.strip_prefix("@user_script: 1: ") {
        Some(text) => format!("ERR {text}"),
        None => text.to_owned(),
    }
}

#[test]
fn a_refused_wait_names_the_right() {
    let server = server();
    let user = ["ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*"];
    ask(&server, &[&user[..], &["+@all", "-wait"]].concat());
    let url = format!("redis://limited:secret@127.0.0.1:{}", server.port());
    let client = steady(&url).replicas(1, millis(50)).build().unwrap();
    let error = client.mutex("k").try_lock().map(drop).unwrap_err();
    let message = format!(
        "Redis denies access (\"k\"): ADDR: WAIT, which `replicas` needs, is refused: {}; allow `replicas` of \
         `leasehold acl`",
        refusal(&url, &["WAIT", "0", "0"])
    );
    assert_says(&error, &url, &message);
}

#[test]
fn too_few_replicas_are_counted() {
    let server = server();
    let client = steady(&server.url()).replicas(1, millis(50)).build();
    let error = client.unwrap().mutex("k").try_lock().map(drop).unwrap_err();
    assert_says(
        &error,
        &server.url(),
        "Redis is unavailable (\"k\"): ADDR: 0 of 1 replicas acknowledged within 50ms; check the links of the replicas \
         (INFO replication)",
    );
}

#[test]
fn an_outage_is_named_once_with_its_reason() {
    let url = format!("redis://127.0.0.1:{}", closed_port());
    let client = steady(&url).outage_timeout(millis(100));
    let error = client.build_lazy().unwrap().mutex("k").lock();
    assert_says(
        &error.map(drop).unwrap_err(),
        &url,
        "Redis is unavailable (\"k\"): for TIME s: ADDR refuses connections; check that Redis runs there, and the port",
    );
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
        "Redis is unavailable: ADDR did not answer the login within 2s (`connect_timeout`); \
         check the server's load and the network",
    );
    server.resume();
}

#[test]
fn a_closed_connection_is_named() {
    let fake = Fake::start(Manner::Closing);
    assert_opening_says(
        &fake.url(),
        "Redis is unavailable: ADDR closed the connection during the login, after CLIENT SETINFO; check the server's \
         log, use rediss:// if this is its TLS port, or, if it is a proxy that does not know CLIENT SETINFO, use the \
         URL of the server behind it",
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
        "invalid configuration: ADDR refuses SELECT during the login: ERR DB index is out of range; use a database \
         that the server has: the URL names 4711",
    );
}

#[test]
fn a_refused_write_names_the_primary() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    // A replica may be read before it has found its primary.
    ask(
        &server,
        &["REPLICAOF", "127.0.0.1", &closed_port().to_string()],
    );
    let error = client.mutex("k").try_lock().map(drop).unwrap_err();
    let message = format!(
        "Redis is unavailable (\"k\"): ADDR: {}; use the URL of the primary; with sentinels or on a Cluster, try again \
         after the fail-over",
        refusal(&server.url(), &["SET", "k", "1"])
    );
    assert_says(&error, &server.url(), &message);
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
fn sentinels_that_name_no_primary_say_why() {
    let none = |group: &str, why: &str| {
        format!("no sentinel names the primary of the group {group:?}: {why}")
    };
    let assert_group_says = |group: &str, port: u16, kind: &str, why: &str| {
        let error = steady(&format!("redis+sentinel://127.0.0.1:{port}/{group}")).build();
        let message = format!("{kind}: {}", none(group, why));
        assert_says(&error.unwrap_err(), &format!("127.0.0.1:{port}"), &message);
    };
    assert_group_says(
        "g",
        closed_port(),
        "Redis is unavailable",
        "ADDR refuses connections; check that Redis runs there, and the port",
    );
    assert_group_says(
        "g",
        server().port(),
        "invalid configuration",
        "ADDR is no sentinel; use the ports of the sentinels, or redis:// for a single server",
    );
    let group = SentinelGroup::builder().replicas(0).sentinels(1);
    let group = group.sentinel_password("secret").start().unwrap();
    let sentinel = format!("127.0.0.1:{}", group.sentinels()[0].port());
    for (login, why) in [
        (
            None,
            "ADDR refuses the login without a password; give it with `Builder::sentinel_credentials`",
        ),
        (
            Some("wr0ng"),
            "ADDR refuses the login: user or password of `Builder::sentinel_credentials` is wrong; check both",
        ),
    ] {
        let builder = steady(&group.url());
        let builder = match login {
            Some(password) => builder.sentinel_credentials(Credentials::password(password)),
            None => builder,
        };
        let message = format!("Redis denies access: {}", none("mymaster", why));
        assert_says(&builder.build().unwrap_err(), &sentinel, &message);
    }
    let other = group.url().replace("/mymaster", "/other");
    let error = steady(&other).sentinel_credentials(Credentials::password("secret"));
    let why = "ADDR knows no group \"other\"; check the name behind the hosts of the URL";
    let message = format!("invalid configuration: {}", none("other", why));
    assert_says(&error.build().unwrap_err(), &sentinel, &message);
}

#[test]
fn an_unreachable_primary_names_its_sentinel() {
    let group = SentinelGroup::builder().replicas(0).sentinels(1);
    let mut group = group.start().unwrap();
    let url = format!("redis://127.0.0.1:{}", group.servers()[0].port());
    group.server_mut(0).kill();
    let sentinel = group.sentinels()[0].port();
    let error = steady(&group.url()).connect_timeout(secs(1)).build();
    let message = format!(
        "Redis is unavailable: ADDR refuses connections; check that Redis runs there, and the port; the sentinel \
         127.0.0.1:{sentinel} announces this address, which may be right only in its own network (Docker, NAT); \
         announce one that this client can reach (`sentinel monitor`, `replica-announce-ip`)"
    );
    assert_says(&error.unwrap_err(), &url, &message);
}

/// As in Docker, where the nodes announce addresses of their own network.
#[test]
fn unreachable_masters_name_the_slot_map() {
    let cluster = Cluster::builder().masters(2).without_replicas();
    let cluster = cluster.start().unwrap();
    let asked = cluster.nodes()[0].port();
    let url = format!("redis+cluster://127.0.0.1:{asked}");
    let announced = |text: &str| {
        let map = || ask(&cluster.nodes()[0], &["CLUSTER", "SLOTS"]).to_string();
        assert!(
            eventually(2 * SOON, || map().matches(text).count() >= 1),
            "{}",
            map()
        );
    };
    let announce = |node: usize, port: u16| {
        let command = ["CONFIG", "SET", "cluster-announce-port", &port.to_string()];
        ask(&cluster.nodes()[node], &command);
        announced(&port.to_string());
    };
    let keys = [0, 1].map(|node| key_on(&cluster, node));
    let (silent, _sockets) = full_backlog();
    announce(0, closed_port());
    // One of the masters can be reached.
    let client = steady(&url).build().unwrap();
    drop(client);
    announce(1, silent);
    let error = steady(&url).connect_timeout(secs(2)).build().unwrap_err();
    let lazy = steady(&url)
        .command_timeout(secs(2))
        .outage_timeout(millis(1));
    let lazy = lazy.build_lazy().unwrap();
    let by = format!(
        "; the Cluster's node 127.0.0.1:{asked} announces this address, which may be right only in its own network \
         (Docker, NAT); announce one that this client can reach (`cluster-announce-ip`)"
    );
    let none = format!(
        "Redis is unavailable: no master of the Cluster (2 in all) can be connected to: 127.0.0.1:{} refuses \
         connections; check that Redis runs there, and the port{by}",
        closed_port()
    );
    assert_eq!(error.to_string(), none);
    let faults = ["refuses connections", "the TCP connection has not ended"];
    for (key, fault) in keys.iter().zip(faults) {
        let text = lazy.mutex(key).lock().map(drop).unwrap_err().to_string();
        assert!(text.contains(fault) && text.ends_with(&by), "{text}");
    }
}

#[test]
fn nodes_of_a_cluster_say_what_is_missing() {
    let url = |port: u16| format!("redis+cluster://127.0.0.1:{port}");
    assert_opening_says(
        &url(closed_port()),
        "Redis is unavailable: ADDR refuses connections; check that Redis runs there, and the port",
    );
    assert_opening_says(
        &url(server().port()),
        "invalid configuration: ADDR is no node of a Redis Cluster; use redis:// (with TLS rediss://) instead of \
         redis+cluster://",
    );
    let node = Server::builder().arg("cluster-enabled", "yes").start();
    let node = node.unwrap();
    let url = url(node.port());
    assert_opening_says(
        &url,
        "Redis is unavailable: ADDR: no slot of the Cluster has a master yet; wait until `redis-cli --cluster create` \
         has ended",
    );
    // The Cluster is down until all slots have a master.
    ask(&node, &["CLUSTER", "ADDSLOTS", "0"]);
    let client = steady(&url).command_timeout(secs(2)).build().unwrap();
    assert_says(
        &client.mutex(OF_SLOT_0).try_lock().map(drop).unwrap_err(),
        &url,
        "Redis is unavailable (\"{06S}\"): ADDR: the Cluster is down, or has no master for the slot of the key \
         (CLUSTERDOWN); nothing was done; check the nodes with CLUSTER INFO",
    );
    assert_says(
        &client.mutex("{foo}").try_lock().map(drop).unwrap_err(),
        &url,
        "Redis is unavailable (\"{foo}\"): ADDR: no node of the Cluster serves slot 12182; check the slots with \
         `redis-cli --cluster check`",
    );
    let others: Vec<String> = (1..16_384).map(|slot| slot.to_string()).collect();
    let others = others.iter().map(String::as_str);
    let words: Vec<&str> = ["CLUSTER", "ADDSLOTS"].into_iter().chain(others).collect();
    ask(&node, &words);
    let info = || ask(&node, &["CLUSTER", "INFO"]).to_string();
    assert!(eventually(SOON, || info().contains("cluster_state:ok")));
    let guard = client.mutex(OF_SLOT_0).lock().unwrap();
    let error = guard.transaction(|_, pipe| {
        pipe.set("{foo}", "x");
        Ok(())
    });
    assert_says(
        &error.map(drop).unwrap_err(),
        &url,
        "keys of several slots (\"{06S}\"): a key of the transaction is not in slot 0 of the lock's key; give both \
         the same hash tag, such as {user1}:cart and {user1}:orders",
    );
}

/// The name of a lock whose key is in slot 0 of a Cluster.
const OF_SLOT_0: &str = "{06S}";

#[test]
fn malformed_urls_say_what_is_wrong() {
    const ENCODED: &str = ", with other characters than letters, digits and -._~ percent-encoded in user and password";
    let single = "; it must be redis://user:password@host:port/database or unix:///path";
    let cluster = "; it must be redis+cluster://user:password@host:6379,host:6379";
    let group = "; it must be redis+sentinel://user:password@host:26379,host:26379/name/database";
    for (url, fault, form) in [
        ("localhost:6379", "does not begin with redis://", single),
        ("redis://", "has no host", single),
        (
            "redis://h:port",
            "has a port that is no number up to 65535",
            single,
        ),
        (
            "redis://h/zero",
            "has a database that is no number, behind the / after the host",
            single,
        ),
        (
            "redis://:a/b@h",
            "has an @ behind a /, ? or #; in user and password, write these as %2F, %3F and %23",
            single,
        ),
        ("redis://h#x", "has a part behind a #", single),
        ("redis://p%40h", "has a % in the host", single),
        (
            "redis://b\u{fc}cher.example",
            "has a host with characters that are not ASCII; write its ASCII form, which begins with xn--",
            single,
        ),
        (
            "redis://:p%ff@h",
            "has a password that is not UTF-8 after percent-decoding",
            single,
        ),
        (
            "redis://h:0",
            "has the port 0, where no server can listen",
            single,
        ),
        (
            "redis://0.0.0.0:6379",
            "has a host that stands for all addresses of a machine, on which servers listen; connect to one of them: \
             127.0.0.1 (or [::1]) for this machine",
            "",
        ),
        (
            "redis+cluster://h,[::]:6379",
            "has a host that stands for all addresses of a machine, on which servers listen; connect to one of them: \
             127.0.0.1 (or [::1]) for this machine",
            "",
        ),
        (
            "redis://h:1,i:2",
            "has several hosts; use redis+cluster://host,host for the nodes of a Cluster, or \
             redis+sentinel://host,host/name for sentinels",
            "",
        ),
        (
            "redis+cluster://a:0",
            "has the port 0, where no server can listen",
            cluster,
        ),
        (
            "unix://",
            "has no path, or an option db that is no number",
            single,
        ),
        (
            "redis://h?db=1",
            "has an unknown option; known are protocol",
            "",
        ),
        (
            "redis://h?protocol=9",
            "has an unknown version in its option protocol; known are resp2 and resp3",
            "",
        ),
        (
            "redis+cluster://a,b:port",
            "has a port that is no number up to 65535",
            cluster,
        ),
        ("redis+cluster://a,,b", "has an empty host", cluster),
        (
            "redis+cluster://a,u:p@b",
            "has a comma before an @; put user and password before the first host, and write a comma in them as %2C",
            cluster,
        ),
        (
            "redis+cluster://a,b/3",
            "has a database behind the hosts, and a Cluster has only database 0; leave it out",
            "",
        ),
        (
            "redis+sentinel://h",
            "has no name of a group behind the hosts, as in `sentinel monitor <name>`",
            group,
        ),
        (
            "redis+sentinel://h/a%20b",
            "has a name of a group with other characters than letters, digits and -._",
            group,
        ),
        (
            "redis+sentinel://h:0/g",
            "has the port 0, where no server can listen",
            group,
        ),
    ] {
        let encoded = if form.is_empty() { "" } else { ENCODED };
        let message = format!("invalid configuration: url: {fault}{form}{encoded}");
        let error = Client::open(url).unwrap_err();
        assert_says(&error, url, &message);
    }
}
