//! Groups under sentinels are really started, and fail over.

#![allow(clippy::unwrap_used)]

use leasehold_testbed::{Reply, SentinelGroup};

#[test]
fn a_group_fails_over_and_takes_the_old_primary_back() {
    let mut group = SentinelGroup::start().unwrap();
    assert_eq!(group.primary(), Some(0));
    group.servers()[0].command(&["SET", "k", "v"]).unwrap();
    let second = group.fail_over().unwrap();
    group.wait_until_whole().unwrap();
    let value = group.servers()[second].command(&["GET", "k"]).unwrap();
    assert_eq!(value, Reply::Text("v".to_owned()));
    group.server_mut(second).kill();
    let third = group.wait_for_switch(second).unwrap();
    group.server_mut(second).restart().unwrap();
    assert_ne!(third, second);
    group.wait_until_whole().unwrap();
    // On a busy machine, the sentinels may have switched once more.
    let last = group.primary().unwrap();
    let value = group.servers()[last].command(&["GET", "k"]).unwrap();
    assert_eq!(value, Reply::Text("v".to_owned()));
}
