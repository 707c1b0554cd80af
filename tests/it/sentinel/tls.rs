//! `rediss+sentinel://`: TLS to the sentinels and to the servers.

use leasehold::{ErrorKind, TlsConfig};
use leasehold_testbed::SentinelGroup;

use crate::support::{Task, lock, wait_for_queue};
use crate::tls::certificates_for;

use super::{OUTAGE, patient};

#[test]
fn locks_survive_a_fail_over_with_tls() {
    let (files, ca) = certificates_for("127.0.0.1");
    let group = SentinelGroup::builder().replicas(1).sentinels(1).tls(files);
    let mut group = group.start().unwrap();
    let open = || {
        let tls = TlsConfig::new().ca_pem(ca.as_str());
        patient(&group.url()).tls(tls).build().unwrap()
    };
    let (holder, other) = (open(), open());
    let error =
        patient(&group.url()).tls(TlsConfig::new().ca_pem(certificates_for("x").1.as_str()));
    let error = error.build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Tls, "{error}");
    let guard = lock(&holder, "k");
    let mutex = other.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop));
    wait_for_queue(&group.servers()[0], "k", 1);
    group.server_mut(0).kill();
    group.wait_for_switch(0).unwrap();
    guard.unlock().unwrap();
    waiter.within(OUTAGE, "the lock").unwrap();
    lock(&holder, "k").unlock().unwrap();
}
