//! `Client::check_environment`, and the same check after the first connection: each warning on a real server with the
//! bad setting.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use leasehold::{
    Builder, Client, EnvironmentFinding, EnvironmentWarning as Warning, ErrorKind, EventHandler,
};
use leasehold_testbed::{Cluster, Proxy, SentinelGroup, Server, eventually};

use crate::cluster::pool::PooledCluster;
use crate::fakes::{Fake, Manner};
use crate::least_privilege::{commands, create_limited_user};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, ask, builder, lock, millis, secs, within};

/// The warnings that the check of such a client finds, with their texts, without those about the version.
fn found(builder: Builder) -> Vec<(Warning, String)> {
    let client = builder.build_lazy().unwrap();
    let found = client.check_environment().unwrap();
    let found = found.iter().filter(|finding| !is_about_version(finding));
    let parts = |finding: &EnvironmentFinding| (finding.warning().clone(), finding.to_string());
    found.map(parts).collect()
}

fn is_about_version(finding: &EnvironmentFinding) -> bool {
    matches!(finding.warning(), Warning::Untested { .. })
}

fn started(directives: &[(&str, &str)]) -> Server {
    let builder = directives
        .iter()
        .fold(Server::builder(), |builder, (name, value)| {
            builder.arg(*name, *value)
        });
    builder.start().unwrap()
}

/// Settings that cause no `CommandTimeout` warning.
fn with_long_ttl(url: &str) -> Builder {
    steady(url).ttl(LONG_TTL)
}

/// Fails unless the server with these directives has exactly this warning, with this text behind its address.
#[track_caller]
fn assert_warns(directives: &[(&str, &str)], warning: Warning, text: &str) {
    let server = started(directives);
    assert_finds(&server, with_long_ttl(&server.url()), warning, text);
}

#[track_caller]
fn assert_finds(server: &Server, builder: Builder, warning: Warning, text: &str) {
    let text = format!("127.0.0.1:{}: {text}", server.port());
    assert_eq!(found(builder), [(warning, text)]);
}

const SAVED: (&str, &str) = ("appendonly", "yes");

/// The text of [`evicts_keys_with_ttl`].
const EVICTS_KEYS_WITH_TTL: &str = "`maxmemory-policy` is volatile-ttl: Redis evicts locks as soon as `maxmemory` is \
                                    set and used; set the policy to noeviction";

fn evicts_keys_with_ttl() -> Warning {
    Warning::Eviction {
        policy: "volatile-ttl".to_owned(),
        max_memory: 0,
    }
}

#[test]
fn a_good_environment_has_no_findings() {
    let server = started(&[SAVED]);
    assert_eq!(found(with_long_ttl(&server.url())), []);
    let client = with_long_ttl(&server.url()).build().unwrap();
    let findings = client.check_environment().unwrap();
    assert!(findings.iter().all(is_about_version), "{findings:?}");
    let memory = Client::memory().unwrap();
    assert_eq!(memory.check_environment().unwrap(), []);
}

#[test]
fn eviction_is_found() {
    assert_warns(
        &[
            SAVED,
            ("maxmemory-policy", "allkeys-lru"),
            ("maxmemory", "50mb"),
        ],
        Warning::Eviction {
            policy: "allkeys-lru".to_owned(),
            max_memory: 50 << 20,
        },
        "`maxmemory-policy` is allkeys-lru: Redis evicts locks once it uses `maxmemory` (52428800 bytes), and a lock \
         can have two holders then; set the policy to noeviction",
    );
    assert_warns(
        &[SAVED, ("maxmemory-policy", "volatile-ttl")],
        evicts_keys_with_ttl(),
        EVICTS_KEYS_WITH_TTL,
    );
}

#[test]
fn missing_persistence_is_found() {
    assert_warns(
        &[],
        Warning::Persistence {
            has_snapshots: Some(false),
        },
        "nothing is saved: after a restart, all locks are gone while their holders still run; set `appendonly yes`, or \
         fence writes",
    );
    assert_warns(
        &[("save", "3600 1")],
        Warning::Persistence {
            has_snapshots: Some(true),
        },
        "only snapshots are saved: after a restart, all later locks are gone while their holders still run; set \
         `appendonly yes`, or fence writes",
    );
}

#[test]
fn a_replica_is_found_with_its_primary() {
    let primary = started(&[SAVED]);
    let replica = started(&[
        SAVED,
        ("replicaof", &format!("127.0.0.1 {}", primary.port())),
    ]);
    let warning = Warning::Replica {
        primary: Some(format!("127.0.0.1:{}", primary.port())),
    };
    let text = format!(
        "is a replica, which accepts no locks; use the URL of its primary, 127.0.0.1:{}",
        primary.port()
    );
    assert_finds(&replica, with_long_ttl(&replica.url()), warning, &text);
}

#[test]
fn a_sentinel_is_found() {
    let group = SentinelGroup::builder().replicas(0).sentinels(1);
    let group = group.start().unwrap();
    let url = group.sentinels()[0].url();
    let text = format!(
        "{}: is a Sentinel, which stores no locks; use redis+sentinel://host:port/name, with the name of the group \
         that it watches",
        url.trim_start_matches("redis://")
    );
    assert_eq!(found(with_long_ttl(&url)), [(Warning::Sentinel, text)]);
}

#[test]
fn the_primary_of_a_group_is_checked() {
    let group = SentinelGroup::builder().replicas(1).sentinels(1);
    let group = group
        .arg("maxmemory-policy", "volatile-ttl")
        .arg("appendonly", "yes");
    let group = group.start().unwrap();
    assert_finds(
        &group.servers()[0],
        with_long_ttl(&group.url()),
        evicts_keys_with_ttl(),
        EVICTS_KEYS_WITH_TTL,
    );
}

#[test]
fn each_master_in_use_is_checked() {
    let pooled = PooledCluster::take();
    let cluster = pooled.get();
    let client = with_long_ttl(&cluster.url()).build_lazy().unwrap();
    let servers = || {
        let found = client.check_environment().unwrap();
        let found = found.iter().filter(|finding| !is_about_version(finding));
        let servers = found.map(|finding| {
            let is_unsaved = matches!(finding.warning(), Warning::Persistence { .. });
            assert!(is_unsaved, "{finding}");
            finding.server().to_owned()
        });
        servers.collect::<BTreeSet<_>>()
    };
    // The client uses no master yet, so the check asks only one.
    assert_eq!(servers().len(), 1);
    for n in 0..30 {
        lock(&client, &format!("k{n}")).unlock().unwrap();
    }
    let masters = (0..3).map(|node| format!("127.0.0.1:{}", cluster.nodes()[node].port()));
    assert_eq!(servers(), masters.collect());
}

#[test]
fn masters_that_are_away_are_findings() {
    let cluster = Cluster::builder().without_replicas();
    let cluster = cluster.arg("cluster-require-full-coverage", "no");
    let mut cluster = cluster.start().unwrap();
    let client = with_long_ttl(&cluster.url()).build().unwrap();
    for n in 0..30 {
        lock(&client, &format!("k{n}")).unlock().unwrap();
    }
    let addresses = [0, 1, 2].map(|node| format!("127.0.0.1:{}", cluster.nodes()[node].port()));
    cluster.node(0).kill();
    let away = &addresses[0];
    let text = format!(
        "{away}: was not checked: Redis is unavailable: {away} refuses connections; check that Redis runs there, and the \
         port"
    );
    let found = client.check_environment().unwrap();
    let servers: BTreeSet<&str> = found.iter().map(|finding| finding.server()).collect();
    assert_eq!(servers, addresses.iter().map(String::as_str).collect());
    let of_away: Vec<_> = found.iter().filter(|it| it.server() == *away).collect();
    assert_eq!(of_away.len(), 1, "{of_away:?}");
    assert!(matches!(
        of_away[0].warning(),
        Warning::ServerNotChecked { .. }
    ));
    assert_eq!(of_away[0].to_string(), text);
    for node in [1, 2] {
        cluster.node(node).kill();
    }
    let error = client.check_environment().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[test]
fn a_node_of_a_cluster_is_found() {
    assert_warns(
        &[SAVED, ("cluster-enabled", "yes")],
        Warning::ClusterNode,
        "is a node of a Redis Cluster, which stores only a part of the keys; use redis+cluster://host:port",
    );
}

#[track_caller]
fn assert_warns_of_refusal(settings: &[(&str, &str)], refused: &str, effect: &str) {
    let server = started(settings);
    let found = found(with_long_ttl(&server.url()));
    let [(Warning::CommandRefused { command, reply }, text)] = &found[..] else {
        panic!("{found:?}");
    };
    assert_eq!(*command, refused);
    assert!(reply.starts_with("ERR unknown command"), "{reply}");
    let part = format!("{refused} is refused ({reply}): {effect}");
    assert!(text.contains(&part), "{text}");
}

#[test]
fn refused_scripts_are_found() {
    let without_load = ("rename-command", "SCRIPT \"\"");
    assert_warns_of_refusal(
        &[SAVED, without_load],
        "SCRIPT LOAD",
        "the first call of each script sends its text",
    );
    let without_eval = ("rename-command", "EVAL \"\"");
    assert_warns_of_refusal(
        &[SAVED, without_eval],
        "EVAL",
        "locks fail after SCRIPT FLUSH and after a fail-over",
    );
    let server = started(&[SAVED, without_load]);
    ask(&server, &["ACL", "SETUSER", "default", "-eval"]);
    let found = found(with_long_ttl(&server.url()));
    let [(Warning::NoScripts { reply }, text)] = &found[..] else {
        panic!("{found:?}");
    };
    assert!(reply.starts_with("NOPERM "), "{reply}");
    let expected = format!(
        "127.0.0.1:{}: refuses SCRIPT LOAD and EVAL ({reply}), and leasehold needs scripts; allow the user what docs/redis.md \
         lists, or, if this is a proxy, use the URL of the server behind it",
        server.port()
    );
    assert_eq!(*text, expected);
}

/// The `run_id` of a server.
fn run_id(server: &Server) -> String {
    let info = ask(server, &["INFO", "server"]).to_string();
    let (_, rest) = info.split_once("run_id:").expect("INFO has it");
    rest.chars()
        .take_while(char::is_ascii_alphanumeric)
        .collect()
}

/// As with a load balancer in front of two primaries, or of a primary and its replica.
#[test]
fn several_servers_behind_an_address_are_found() {
    let first = started(&[SAVED]);
    let other = started(&[SAVED]);
    let replica = started(&[SAVED, ("replicaof", &format!("127.0.0.1 {}", first.port()))]);
    let proxy = Proxy::start(first.port()).unwrap();
    assert_eq!(found(with_long_ttl(&proxy.url())), []);
    for second in [&other, &replica] {
        proxy.balance(&[first.port(), second.port()]);
        let run_ids = vec![run_id(&first), run_id(second)];
        let text = format!(
            "127.0.0.1:{}: leads to several servers in turn (`run_id` {}), and a lock on one of them is free on the \
             others, so it can have several holders; use the address of one primary, or redis+sentinel:// or \
             redis+cluster:// to have it found",
            proxy.port(),
            run_ids.join(" and ")
        );
        let expected = (Warning::SeveralServers { run_ids }, text);
        assert_eq!(found(with_long_ttl(&proxy.url())), [expected]);
    }
    // The check after the first connection finds it, too.
    let (builder, findings) = reporting(&proxy.url());
    let client = builder.build_lazy().unwrap();
    let _ = client.mutex("k").try_lock();
    let is_found =
        |finding: EnvironmentFinding| matches!(finding.warning(), Warning::SeveralServers { .. });
    let mut findings = std::iter::from_fn(|| findings.recv_timeout(SOON).ok());
    assert!(findings.any(is_found));
}

#[test]
fn a_small_tracking_table_is_found() {
    assert_warns(
        &[SAVED, ("tracking-table-max-keys", "1000")],
        Warning::TrackingTable {
            max_keys: 1000,
            tracked_keys: 0,
        },
        "`tracking-table-max-keys` is 1000, and 0 keys are tracked: once the table is full, losses are found late, \
         and clients are notified although nothing changed; set it to 10000 at least",
    );
}

#[test]
fn a_long_command_timeout_is_found() {
    let server = started(&[SAVED]);
    let builder = with_long_ttl(&server.url())
        .ttl(secs(6))
        .command_timeout(secs(5));
    assert_finds(
        &server,
        builder,
        Warning::CommandTimeout {
            command_timeout: secs(5),
            ttl: secs(6),
            longest: millis(1969),
        },
        "`command_timeout` is 5s, and `ttl` is 6s: if a renewal gets no reply, the lock can be lost before the next \
         one; use 1.969s at most, or a longer ttl",
    );
}

#[test]
fn the_server_version_is_known_without_rights() {
    let server = started(&[SAVED]);
    let commands = commands(&server, &["locks", "script-cache"]);
    let found = found(with_long_ttl(&create_limited_user(&server, &commands, &[])));
    let commands: Vec<_> = found
        .iter()
        .map(|(warning, text)| match warning {
            Warning::CommandRefused { command, reply } => {
                assert!(reply.starts_with("NOPERM"), "{reply}");
                assert!(text.ends_with(&format!(
                    "{command} is refused ({reply}); allow `environment-check` of `leasehold acl`"
                )));
                *command
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(commands, ["INFO", "CONFIG GET"]);
    assert!(
        found[0]
            .1
            .contains(": eviction, persistence and the number of servers were not checked: ")
    );
    assert!(
        found[1]
            .1
            .contains(": snapshots and the tracking table were not checked: ")
    );
}

/// A proxy may know no `HELLO`. `INFO` tells the version and the role, too.
#[test]
fn a_server_without_hello_is_checked() {
    let primary = started(&[SAVED]);
    let of_primary = format!("127.0.0.1 {}", primary.port());
    let directives = [
        SAVED,
        ("replicaof", &of_primary),
        ("rename-command", "HELLO \"\""),
    ];
    let server = started(&directives);
    let found = found(with_long_ttl(&server.url()));
    assert!(
        matches!(found[..], [(Warning::Replica { .. }, _)]),
        "{found:?}"
    );
    let commands = commands(&server, &["locks"]);
    let url = create_limited_user(&server, &commands, &[]);
    let found = self::found(with_long_ttl(&url));
    let is_hello = |(warning, _): &(Warning, String)| {
        matches!(
            warning,
            Warning::CommandRefused {
                command: "HELLO",
                ..
            }
        )
    };
    assert!(found.iter().any(is_hello), "{found:?}");
}

#[test]
fn a_check_without_answers_is_an_error() {
    let locked = Server::builder().password("secret").start().unwrap();
    for login in ["", ":wr0ng@"] {
        let url = format!("redis://{login}127.0.0.1:{}", locked.port());
        let client = with_long_ttl(&url).build_lazy().unwrap();
        let error = client.check_environment().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }
    for (manner, kind) in [
        (Manner::Http, ErrorKind::Protocol),
        (Manner::Mute, ErrorKind::Unavailable),
        (Manner::Unending, ErrorKind::Unavailable),
        (Manner::Parrot, ErrorKind::Protocol),
        (Manner::Closing, ErrorKind::Unavailable),
    ] {
        let fake = Fake::start(manner);
        let client = builder(&fake.url()).build_lazy().unwrap();
        let error = within(SOON, "the check", move || {
            client.check_environment().unwrap_err()
        });
        assert_eq!(error.kind(), kind, "{error}");
    }
    let client = builder(&locked.url()).build().unwrap();
    client.shutdown(SOON).unwrap();
    assert_eq!(
        client.check_environment().unwrap_err().kind(),
        ErrorKind::Shutdown
    );
}

struct Warnings(Sender<EnvironmentFinding>);

impl EventHandler for Warnings {
    fn environment_warning(&self, finding: &EnvironmentFinding) {
        let _ = self.0.send(finding.clone());
    }
}

fn reporting(url: &str) -> (Builder, Receiver<EnvironmentFinding>) {
    let (sender, findings) = channel();
    let builder = with_long_ttl(url).environment_check(true);
    (builder.event_handler(Arc::new(Warnings(sender))), findings)
}

/// The checks so far. Each reads two settings.
fn checks(server: &Server) -> u64 {
    let calls = |name| server.calls(name).unwrap();
    (calls("config") + calls("config|get")) / 2
}

#[test]
fn a_client_checks_its_environment_once() {
    let server = started(&[SAVED, ("maxmemory-policy", "allkeys-lru")]);
    for is_lazy in [false, true] {
        let before = checks(&server);
        let (builder, findings) = reporting(&server.url());
        let client = match is_lazy {
            false => builder.build().unwrap(),
            true => builder.build_lazy().unwrap(),
        };
        if is_lazy {
            assert_eq!(checks(&server), before, "a lazy client has connected");
            client.with_lock("k", || ()).unwrap();
        }
        let mut found = findings.recv_timeout(SOON).unwrap();
        if is_about_version(&found) {
            found = findings.recv_timeout(SOON).unwrap();
        }
        assert!(
            matches!(found.warning(), Warning::Eviction { .. }),
            "{found}"
        );
        assert_eq!(found.server(), format!("127.0.0.1:{}", server.port()));
        ask(&server, &["CLIENT", "KILL", "TYPE", "normal"]);
        client.with_lock("k", || ()).unwrap();
        client.shutdown(SOON).unwrap();
        drop(client);
        // The handler is gone with the client.
        assert!(findings.recv_timeout(SOON).is_err());
        assert_eq!(checks(&server), before + 1);
    }
}

/// The end of a client closes the connection of its check.
#[test]
fn a_check_without_reply_delays_no_shutdown() {
    let fake = Fake::start(Manner::Mute);
    let (builder, _findings) = reporting(&fake.url());
    let client = builder.build_lazy().unwrap();
    let other = client.clone();
    let check = crate::support::Task::start(move || other.check_environment().unwrap_err());
    assert!(eventually(SOON, || fake.connections() > 0));
    client.shutdown(SOON).unwrap();
    let error = check.within(secs(4), "the check");
    assert!(error.is_unavailable(), "{error}");
}

/// The password is also a part of the server's error, `no permissions`.
#[test]
fn findings_do_not_show_the_password() {
    let server = started(&[SAVED]);
    let user = [
        "ACL",
        "SETUSER",
        "u",
        "on",
        ">no permissions",
        "~*",
        "&*",
        "+@all",
        "-config",
    ];
    server.command(&user).unwrap();
    let url = format!("redis://u:no%20permissions@127.0.0.1:{}", server.port());
    let found = found(with_long_ttl(&url));
    assert!(!found.is_empty());
    for (warning, text) in found {
        let text = format!("{warning:?} {text}");
        assert!(text.contains("NOPERM"), "{text}");
        assert!(!text.contains("no permissions"), "{text}");
    }
}
