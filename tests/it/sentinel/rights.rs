//! A user at the sentinels with exactly the rights that `leasehold acl --topology sentinel` prints: everything works
//! with them, and each of them is needed. `conformance::redis_under_a_sentinel` runs the whole suite under these
//! rights.

use leasehold::{Builder, Credentials, ErrorKind};
use leasehold_testbed::{SentinelGroup, Server, eventually};

use super::patient;
use crate::least_privilege::rights::{self, Feature};
use crate::least_privilege::{commands, create_limited_user, product, refused};
use crate::support::{SOON, ask, lock};

/// Creates the user of [`limited_login`] at a sentinel, with all rights in the table but `dropped`.
pub fn create_user_at_sentinel(sentinel: &Server, dropped: Option<&str>) {
    let features: Vec<&Feature> = rights::AT_SENTINELS.iter().collect();
    let commands = rights::commands(&features, product(sentinel));
    let mut rule = rights::rule_at_sentinels(&commands);
    rule.retain(|word| dropped.is_none_or(|dropped| word[1..] != *dropped));
    let words = ["ACL", "SETUSER", "limited", "reset", "on", ">secret"];
    let words = words.into_iter().chain(rule.iter().map(String::as_str));
    ask(sentinel, &words.collect::<Vec<_>>());
    ask(sentinel, &["ACL", "LOG", "RESET"]);
}

pub fn limited_login() -> Credentials {
    Credentials::user("limited", "secret")
}

/// Creates the user of [`limited_login`] at a server of a group, with the rights to locks, transactions and `replicas`.
pub fn create_user_at_server(server: &Server) {
    let commands = commands(
        server,
        &["usual", "fenced-values", "transactions", "replicas"],
    );
    create_limited_user(server, &commands, &[]);
    ask(server, &["ACL", "LOG", "RESET"]);
}

/// Fails if a right was missing at a server or a sentinel that runs.
pub fn assert_suffice(group: &SentinelGroup) {
    for server in group.servers().iter().chain(group.sentinels()) {
        // Some tests kill a server.
        if server.command(&["PING"]).is_ok() {
            let refused = refused(server);
            assert!(refused.is_empty(), "rights are missing: {refused:?}");
        }
    }
}

fn builder(group: &SentinelGroup) -> Builder {
    patient(&group.url()).sentinel_credentials(limited_login())
}

#[test]
fn exactly_the_printed_sentinel_rights_are_needed() {
    let group = SentinelGroup::builder().replicas(0).sentinels(1);
    let group = group.start().unwrap();
    let sentinel = &group.sentinels()[0];
    create_user_at_sentinel(sentinel, None);
    let client = builder(&group).build().unwrap();
    lock(&client, "k").unlock().unwrap();
    let listens = || {
        let clients = ask(sentinel, &["CLIENT", "LIST"]);
        let mut clients = clients.as_text().unwrap().lines();
        let name = format!(" name=leasehold-sentinels:{} ", client.holder_id());
        clients.any(|it| it.contains(&name) && it.contains(" sub=1 "))
    };
    assert!(eventually(SOON, listens), "not subscribed");
    assert_eq!(refused(sentinel), [""; 0]);
    drop(client);
    let features: Vec<&Feature> = rights::AT_SENTINELS.iter().collect();
    let mut all = rights::commands(&features, product(sentinel));
    all.push(&rights::CHANNEL_AT_SENTINELS[1..]);
    for dropped in all {
        create_user_at_sentinel(sentinel, Some(dropped));
        match builder(&group).build() {
            Ok(client) => lock(&client, "k").unlock().unwrap(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
                assert_eq!(dropped, "sentinel|get-master-addr-by-name");
                continue;
            }
        };
        // The client works. The sentinel tells which request it has refused, before version 7.0 without the subcommand.
        let is_refused = || {
            refused(sentinel)
                .iter()
                .any(|it| dropped.starts_with(it.as_str()))
        };
        assert!(eventually(SOON, is_refused), "{dropped} is not needed");
    }
}
