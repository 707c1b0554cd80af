//! A user of a Cluster with exactly the rights that `leasehold acl` prints: everything works with them, and each of
//! them is needed. `least_privilege` has the features of a single server.

use leasehold::{Client, ErrorKind};
use leasehold_testbed::{Cluster, Reply, eventually};

use super::{key_on, server_of};
use crate::least_privilege::{
    Effect, as_limited, commands, create_limited_user, refused, text, unlocked, version,
};
use crate::steady::steady;
use crate::support::{LONG_TTL, Recorder, SOON, Task, What, ask, in_redis, secs};

/// Features of a Cluster, and the trial of each.
#[expect(clippy::type_complexity, reason = "it is the table")]
pub const TRIALS: &[(&str, fn(&Cluster) -> Result<(), Effect>)] = &[
    ("cluster", follow_a_moving_slot),
    ("shard-channels", be_notified_by_shard),
];

fn client(cluster: &Cluster) -> Result<Client, Effect> {
    let builder = steady(&as_limited(&cluster.url())).ttl(LONG_TTL);
    builder.build().map_err(text)
}

fn follow_a_moving_slot(cluster: &Cluster) -> Result<(), Effect> {
    let client = client(cluster)?;
    let key = key_on(cluster, 0);
    let (lock, slot) = (in_redis(&key), cluster.slot_of(&in_redis(&key)));
    let guard = client.mutex(&key).lock().map_err(text)?;
    cluster.begin_move(slot, 1).unwrap();
    cluster.move_keys(slot, 1, |key| key == lock).unwrap();
    // A renewal has 100 ms for the other node, which a busy machine may exceed.
    let extend = |_| match guard.extend(secs(70)) {
        Err(error) if error.is_unavailable() => None,
        extended => Some(extended),
    };
    let extended = (0..20).find_map(extend).expect("the other node replies");
    cluster.move_keys(slot, 1, |_| true).unwrap();
    cluster.end_move(slot, 1).unwrap();
    extended.map_err(|error| {
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        text(error)
    })?;
    unlocked(guard)
}

/// Without the rights to shard channels, the grant comes on the plain channel.
fn be_notified_by_shard(cluster: &Cluster) -> Result<(), Effect> {
    let recorder = Recorder::new();
    let builder = steady(&as_limited(&cluster.url())).ttl(LONG_TTL);
    let waiting = builder.event_handler(std::sync::Arc::clone(&recorder));
    let waiting = waiting.build().map_err(text)?;
    let key = key_on(cluster, 0);
    let node = server_of(cluster, &key);
    let guard = client(cluster)?.mutex(&key).lock().map_err(text)?;
    let mutex = waiting.mutex(&key);
    let waiter = Task::start(move || mutex.lock().map_err(text).and_then(unlocked));
    let is_queued = || {
        let keys = super::keys(node);
        keys.iter().any(|it| it.starts_with(&in_redis("~queue{")))
    };
    assert!(eventually(SOON, is_queued), "not queued");
    let has_shard_channel = || {
        let channels = node.command(&["PUBSUB", "SHARDCHANNELS"]).unwrap();
        matches!(channels, Reply::Array(channels) if !channels.is_empty())
    };
    let has_shards = version(node) >= (7, 0);
    let is_heard = !has_shards || eventually(secs(2), has_shard_channel);
    unlocked(guard)?;
    waiter.within(SOON, "the waiter")?;
    assert_eq!(recorder.count(What::NotificationsRefused, ""), 0);
    match is_heard {
        true => Ok(()),
        false => Err("no shard channel".to_owned()),
    }
}

/// Runs a trial with the rights of its feature and of those that it needs, except the right to `dropped`.
fn run(
    cluster: &Cluster,
    name: &str,
    dropped: Option<&str>,
    trial: fn(&Cluster) -> Result<(), Effect>,
) -> Result<(), Effect> {
    for node in cluster.nodes() {
        let mut commands = commands(node, &["usual", "cluster", name]);
        commands.retain(|command| Some(*command) != dropped);
        create_limited_user(node, &commands, &[]);
        ask(node, &["ACL", "LOG", "RESET"]);
    }
    trial(cluster)?;
    let refused: Vec<String> = cluster.nodes().iter().flat_map(refused).collect();
    match dropped {
        // This user has no rights to shard channels.
        None if name == "cluster" => Ok(()),
        _ if refused.is_empty() => Ok(()),
        _ => Err(format!("refused: {refused:?}")),
    }
}

#[test]
fn exactly_the_printed_cluster_rights_are_needed() {
    let cluster = Cluster::builder().without_replicas().start().unwrap();
    for (name, trial) in TRIALS {
        let ran = run(&cluster, name, None, *trial);
        ran.unwrap_or_else(|effect| panic!("{name}: {effect}"));
        for command in commands(&cluster.nodes()[0], &[name]) {
            let effect = run(&cluster, name, Some(command), *trial);
            let effect = effect.expect_err(command);
            println!("{name} without {command}: {effect}");
            let right = command.split('|').next().unwrap();
            let is_named = effect.contains(right) || effect == "no shard channel";
            assert!(is_named, "{name} without {command}: {effect}");
        }
    }
}
