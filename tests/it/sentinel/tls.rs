//! `rediss+sentinel://`: TLS to the sentinels and to the servers. `fail_overs` has its faults.

use leasehold::{ErrorKind, TlsConfig};
use leasehold_testbed::SentinelGroup;

use crate::support::lock;
use crate::tls::certificates_for;

use super::patient;

#[test]
fn certificates_of_sentinels_and_servers_are_checked() {
    let (files, ca) = certificates_for("127.0.0.1");
    let group = SentinelGroup::builder().replicas(0).sentinels(1).tls(files);
    let group = group.start().unwrap();
    let open = |ca: &str| {
        let tls = TlsConfig::new().ca_pem(ca);
        patient(&group.url()).tls(tls).build()
    };
    let error = open(&certificates_for("x").1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Tls, "{error}");
    lock(&open(&ca).unwrap(), "k").unlock().unwrap();
}
