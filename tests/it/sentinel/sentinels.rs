//! Sentinels that are dead, silent, or refuse the client; wrong addresses.

use std::sync::Arc;

use leasehold::{Client, Credentials, ErrorKind};
use leasehold_testbed::{Proxy, SentinelGroup, SentinelGroupBuilder, eventually};

use crate::child::{self, Child, Parent};
use crate::connecting::script_commands;
use crate::steady::steady;
use crate::support::{
    Recorder, SOON, What, ask, builder, kill_connections, lock, millis, notified_clients, secs,
    server, texts_of,
};

use super::patient;

/// A group that cannot fail over.
fn single() -> SentinelGroupBuilder {
    SentinelGroup::builder().replicas(0).sentinels(1)
}

#[test]
fn dead_sentinels_cost_a_share_of_the_timeout() {
    let group = SentinelGroup::builder().replicas(0);
    let mut group = group.start().unwrap();
    // The client gives a third of this time to each sentinel.
    let new_client = |group: &SentinelGroup| {
        let builder = patient(&group.url()).connect_timeout(secs(9));
        builder.build().unwrap()
    };
    let client = new_client(&group);
    // A sentinel that is stopped accepts connections, and never replies.
    group.sentinels()[0].stop();
    let second = new_client(&group);
    group.sentinel_mut(0).kill();
    group.sentinel_mut(1).kill();
    let third = new_client(&group);
    for client in [&client, &second, &third] {
        lock(client, "k").unlock().unwrap();
    }
    group.sentinel_mut(2).kill();
    let url = group.url();
    let error = builder(&url).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let shown = error.to_string();
    for sentinel in group.sentinels() {
        let refused = format!("127.0.0.1:{} refuses connections", sentinel.port());
        assert!(shown.contains(&refused), "{shown}");
    }
    // Connections that are open need no sentinel.
    lock(&client, "k").unlock().unwrap();
}

/// The client connects to the last known primary again, but not if that server is no primary any more.
#[test]
fn without_sentinels_a_broken_connection_costs_no_lock() {
    let mut group = single().start().unwrap();
    let recorder = Recorder::new();
    let client = patient(&group.url()).ttl(secs(6));
    let client = client.event_handler(Arc::clone(&recorder)).build().unwrap();
    let held: Vec<_> = (0..20).map(|n| lock(&client, &format!("k{n}"))).collect();
    group.sentinel_mut(0).kill();
    let server = &group.servers()[0];
    let before = script_commands(server);
    kill_connections(server);
    lock(&client, "other").unlock().unwrap();
    assert!(script_commands(server) > before);
    recorder.wait_for(1, What::SentinelsUnavailable, "");
    // Longer than the ttl: a lock that is not renewed in this time is lost.
    std::thread::sleep(secs(7));
    assert!(held.iter().all(|guard| !guard.is_lost()));
    kill_connections(server);
    for guard in held {
        guard.unlock().unwrap();
    }
    assert_eq!(recorder.count(What::SentinelsUnavailable, ""), 1);
    ask(server, &["REPLICAOF", "127.0.0.1", "1"]);
    kill_connections(server);
    let error = client.ping().unwrap_err();
    let wanted = format!(
        "Redis is unavailable: no sentinel names the primary of the group \"mymaster\": 127.0.0.1:{} refuses \
         connections; check that Redis runs there, and the port; the last primary: 127.0.0.1:{} is no primary any more; \
         check the sentinels, which name the new one",
        group.sentinels()[0].port(),
        server.port()
    );
    assert_eq!(error.to_string(), wanted);
}

#[test]
fn a_client_learns_of_the_other_sentinels() {
    let group = SentinelGroup::builder().replicas(0);
    let mut group = group.start().unwrap();
    let client = patient(&group.url_of(&[0])).build().unwrap();
    group.sentinel_mut(0).kill();
    kill_connections(&group.servers()[0]);
    lock(&client, "k").unlock().unwrap();
    let error = builder(&group.url_of(&[0])).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[test]
fn a_wrong_group_name_is_an_error() {
    let group = single().start().unwrap();
    let url = group.url().replace("/mymaster", "/other");
    let error = steady(&url).build().unwrap_err();
    let shown = error.to_string();
    let wanted = format!(
        "invalid configuration: no sentinel names the primary of the group \"other\": \
         127.0.0.1:{} knows no group \"other\"; check the name behind the hosts of the URL",
        group.sentinels()[0].port()
    );
    assert_eq!(shown, wanted);
}

#[test]
fn sentinels_and_servers_have_separate_passwords() {
    let group = single()
        .password("of-the-server")
        .sentinel_password("of-the-sentinel");
    let group = group.start().unwrap();
    let open = |login: Option<&str>| {
        let builder = steady(&group.url());
        let builder = match login {
            Some(password) => builder.sentinel_credentials(Credentials::password(password)),
            None => builder,
        };
        let shown = format!("{builder:?}");
        assert!(!shown.contains("of-the"), "{shown}");
        builder.build()
    };
    let client = open(Some("of-the-sentinel")).unwrap();
    let shown = format!("{client:?}");
    let address = group.url().replace(":of-the-server@", "");
    assert!(
        shown.contains(&address) && !shown.contains("of-the"),
        "{shown}"
    );
    lock(&client, "k").unlock().unwrap();
    for (login, part) in [
        (
            None,
            "refuses the login without a password; give it with `Builder::sentinel_credentials`",
        ),
        (
            Some("wr0ng"),
            "refuses the login: user or password of `Builder::sentinel_credentials` is wrong; check both",
        ),
    ] {
        let error = open(login).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(error.to_string().contains(part), "{error}");
        let texts = texts_of(&error).concat();
        assert!(
            !texts.contains("wr0ng") && !texts.contains("of-the"),
            "{texts}"
        );
    }
    let without = group.url().replace(":of-the-server@", "");
    let error = steady(&without).sentinel_credentials(Credentials::password("of-the-sentinel"));
    let error = error.build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    // The callback gives the login of the servers.
    let client = steady(&without)
        .sentinel_credentials(Credentials::user("default", "of-the-sentinel"))
        .credentials(|| Ok(Credentials::password("of-the-server")));
    lock(&client.build().unwrap(), "k").unlock().unwrap();
}

#[test]
fn a_login_of_sentinels_needs_sentinels() {
    let login = || Credentials::password("secret");
    for url in ["redis://127.0.0.1:1", "memory://without-sentinels"] {
        let error = Client::builder(url).sentinel_credentials(login()).build();
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        assert!(
            error.to_string().contains("sentinel_credentials"),
            "{error}"
        );
    }
}

#[test]
fn a_server_instead_of_a_sentinel_is_named() {
    let server = server();
    let url = format!("redis+sentinel://127.0.0.1:{}/mymaster", server.port());
    let error = steady(&url).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
    let part = format!("127.0.0.1:{} is no sentinel; use", server.port());
    assert!(error.to_string().contains(&part), "{error}");
}

/// A sentinel names a replica: its answer is old, or wrong.
#[test]
fn a_replica_is_never_used() {
    let group = SentinelGroup::builder().replicas(1).sentinels(1).start();
    let group = group.unwrap();
    let replica = &group.servers()[1];
    let url = group.watch_also("wrong", replica.port()).unwrap();
    let before = replica.calls("script|exists").unwrap();
    // After some seconds, the sentinel itself finds its mistake, and names the right server.
    if let Err(error) = steady(&url).connect_timeout(secs(4)).build() {
        let replica = format!("127.0.0.1:{} is no primary", replica.port());
        let sentinel = group.sentinels()[0].port();
        let parts = [
            format!("{replica}, although the sentinel 127.0.0.1:{sentinel} names it"),
            // The last attempt had little time, so the error also reports its fault.
            format!("{replica} any more"),
        ];
        let text = error.to_string();
        assert!(parts.iter().any(|part| text.contains(part)), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
    assert_eq!(replica.calls("script|exists").unwrap(), before);
}

/// The client connects to the address that the sentinel names, not to one that it has seen before.
#[test]
fn each_connection_asks_for_the_primary() {
    let group = single().start().unwrap();
    let proxy = Proxy::start(group.servers()[0].port()).unwrap();
    let url = group.watch_also("proxied", proxy.port()).unwrap();
    let client = patient(&url).build().unwrap();
    lock(&client, "k").unlock().unwrap();
    let sentinel = &group.sentinels()[0];
    sentinel
        .command(&["SENTINEL", "REMOVE", "proxied"])
        .unwrap();
    group
        .watch_also("proxied", group.servers()[0].port())
        .unwrap();
    proxy.refuse(true);
    proxy.cut_all();
    lock(&client, "k").unlock().unwrap();
}

#[test]
fn a_client_under_sentinels_has_one_more_thread() {
    if child::threads().is_none() {
        return;
    }
    let group = single().start().unwrap();
    Child::start(count_threads_of_clients, &group.url()).finish(secs(120));
}

pub fn count_threads_of_clients(parent: &Parent) {
    let before = child::threads().unwrap();
    let assert_more = |more: usize| {
        let seen = eventually(SOON, || child::threads().unwrap() == before + more);
        assert!(
            seen,
            "{} threads, not {more}",
            child::threads().unwrap() - before
        );
    };
    let client = Client::open(&parent.url).unwrap();
    let own = 5 + usize::from(cfg!(any(feature = "tracing", feature = "metrics")));
    assert_more(own);
    lock(&client, "k").unlock().unwrap();
    assert_more(own);
    client.shutdown(SOON).unwrap();
    drop(client);
    assert_more(0);
}

/// Each thread of the client that asks the sentinel would wait for half a minute.
#[test]
fn a_client_ends_soon_while_no_sentinel_replies() {
    let group = single().start().unwrap();
    let client = patient(&group.url())
        .connect_timeout(secs(60))
        .command_timeout(secs(60))
        .build()
        .unwrap();
    // The client is notified of changes of its lock.
    let guard = lock(&client, "k");
    let server = &group.servers()[0];
    assert!(eventually(SOON, || notified_clients(server) == 1));
    guard.unlock().unwrap();
    group.sentinels()[0].stop();
    // The thread for notifications asks the sentinel, too.
    ask(server, &["CLIENT", "KILL", "TYPE", "pubsub"]);
    assert!(eventually(SOON, || notified_clients(server) == 0));
    client.shutdown(SOON).unwrap();
    let lazy = builder(&group.url()).outage_timeout(millis(1));
    let lazy = lazy.build_lazy().unwrap();
    let error = lazy.mutex("k").lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    lazy.shutdown(SOON).unwrap();
}
