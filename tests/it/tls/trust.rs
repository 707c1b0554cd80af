//! Certificates of servers and clients that are accepted, and the errors for those that are refused.

use std::fs;
use std::process::Command;

use leasehold::redis::{ConnectionAddr, IntoConnectionInfo};
use leasehold::{Builder, Client, Error, ErrorKind, TlsConfig};
use leasehold_testbed::Server;
use tempfile::TempDir;

use crate::bad_input::messages::assert_says;
use crate::child::{Child, Parent};
use crate::fakes::{Fake, Manner};
use crate::steady::steady;
use crate::support::{SOON, builder, secs, server};

use super::TlsServer;
use super::certificates::{Authority, Certificate, Validity};

/// Fails unless `build`, and `lock` of a client that was built without connecting, fail with the kind `Tls` and this
/// reason.
#[track_caller]
fn assert_refused(builder: impl Fn() -> Builder, reason: &str) {
    let lazy = builder().build_lazy().unwrap();
    for error in [
        builder().build().unwrap_err(),
        lazy.mutex("k").lock().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Tls, "{error:?}");
        assert!(error.to_string().contains(reason), "{error}");
        assert!(error.to_string().contains("127.0.0.1:"), "{error}");
    }
}

#[track_caller]
fn assert_invalid(error: Error, why: &str) {
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn a_trusted_certificate_is_accepted() {
    let tls = TlsServer::start();
    let client = tls.client();
    assert_eq!(client.with_lock("k", || 1).unwrap(), 1);
    let stats = tls.server.command(&["CLIENT", "LIST"]).unwrap();
    assert!(!stats.as_text().unwrap().is_empty());
}

/// The outcome of a lock by a client that trusts the authorities of the system.
pub fn lock_with_the_systems_authorities(parent: &Parent) {
    let client = steady(&parent.url).build();
    let outcome = client.and_then(|client| client.with_lock("k", || "locked".to_owned()));
    parent.tell(outcome.unwrap_or_else(|error| error.to_string()));
}

/// `SSL_CERT_FILE` names the authorities in place of those of the system. It applies to a whole process.
#[test]
fn authorities_of_the_system_are_trusted() {
    let tls = TlsServer::start();
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("authorities.pem");
    let other = Authority::new();
    for (authorities, outcome) in [
        (&tls.authority.pem, "locked"),
        (&other.pem, "unknown issuer"),
    ] {
        fs::write(&file, authorities).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .env("SSL_CERT_FILE", &file)
            .env_remove("SSL_CERT_DIR");
        let child = Child::start_by(command, lock_with_the_systems_authorities, &tls.url());
        let errors: String = child.receive(6 * SOON);
        child.finish(SOON);
        assert!(errors.contains(outcome), "{errors}");
    }
}

#[test]
fn an_address_with_tls_in_code_connects() {
    let tls = TlsServer::start();
    let address = ConnectionAddr::TcpTls {
        host: "127.0.0.1".to_owned(),
        port: tls.server.tls_port(),
        insecure: false,
        tls_params: None,
    };
    let info = address.into_connection_info().unwrap();
    let client = Client::builder(info).tls(tls.trusted()).build().unwrap();
    client.with_lock("k", || ()).unwrap();
}

#[test]
fn a_certificate_of_an_unknown_issuer_is_refused() {
    let tls = TlsServer::start();
    let other = Authority::new();
    let reason = "unknown issuer; give the issuer's certificate with TlsConfig::ca_pem";
    assert_refused(|| steady(&tls.url()), reason);
    let ca = TlsConfig::new().ca_pem(other.pem);
    assert_refused(|| steady(&tls.url()).tls(ca.clone()), reason);
}

#[test]
fn a_certificate_past_its_time_is_refused() {
    let tls = TlsServer::start_with("127.0.0.1", Validity::Expired, false);
    assert_refused(|| tls.steady(), "a certificate that has expired");
}

#[test]
fn a_certificate_before_its_time_is_refused() {
    let tls = TlsServer::start_with("127.0.0.1", Validity::NotYet, false);
    assert_refused(|| tls.steady(), "a certificate that is not valid yet");
}

#[test]
fn a_certificate_for_another_name_needs_that_name() {
    let tls = TlsServer::start_with("redis.internal", Validity::Now, false);
    assert_refused(|| tls.steady(), "not for \"127.0.0.1\"");
    let named = |name: &str| steady(&tls.url()).tls(tls.trusted().server_name(name));
    let client = named("redis.internal").build().unwrap();
    client.with_lock("k", || ()).unwrap();
    assert_refused(|| named("other.internal"), "not for \"other.internal\"");
}

#[test]
fn a_requested_client_certificate_is_sent() {
    let tls = TlsServer::start_with("127.0.0.1", Validity::Now, true);
    let own = tls.authority.of_client();
    let with = |chain: &str, key: &str| {
        let trusted = tls.trusted();
        steady(&tls.url()).tls(trusted.client_certificate_pem(chain, key))
    };
    let client = with(&own.chain, &own.key).build().unwrap();
    client.with_lock("k", || ()).unwrap();
    assert_refused(|| tls.steady(), "requires a client certificate");
    let foreign = Authority::new().of_client();
    assert_refused(
        || with(&foreign.chain, &foreign.key),
        "refuses the client certificate",
    );
    let error = with(&own.chain, &foreign.key).build_lazy().unwrap_err();
    assert_invalid(error, "a key that does not fit");
}

#[test]
fn plain_urls_for_tls_ports_are_reported() {
    let tls = TlsServer::start();
    let url = tls.url().replace("rediss", "redis");
    let error = steady(&url).build().unwrap_err();
    assert!(error.to_string().contains("use rediss://"), "{error}");
}

#[test]
fn tls_urls_for_plain_ports_are_reported() {
    let server = server();
    let url = server.url().replace("redis:", "rediss:");
    // The server takes the handshake for the beginning of a command, and waits for the rest.
    let error = builder(&url).connect_timeout(secs(1)).build().unwrap_err();
    assert_says(
        &error,
        &url,
        "Redis is unavailable: ADDR did not answer the TLS handshake within 1s (`connect_timeout`); \
         use redis:// if this port is one without TLS",
    );
}

#[test]
fn messages_name_server_fault_and_next_step() {
    let tls = TlsServer::start();
    assert_says(
        &steady(&tls.url()).build().unwrap_err(),
        &tls.url(),
        "no TLS connection: ADDR has a certificate of an unknown issuer; give the issuer's certificate \
         with TlsConfig::ca_pem",
    );
    let fake = Fake::start(Manner::Http);
    let url = fake.url().replace("redis:", "rediss:");
    assert_says(
        &steady(&url).tls(tls.trusted()).build().unwrap_err(),
        &url,
        "no TLS connection: ADDR does not speak TLS on this port; use its TLS port, or redis:// for \
         one without TLS",
    );
    let expired = TlsServer::start_with("127.0.0.1", Validity::Expired, false);
    assert_says(
        &expired.steady().build().unwrap_err(),
        &expired.url(),
        "no TLS connection: ADDR has a certificate that has expired; renew it, or set this machine's \
         clock",
    );
    let early = TlsServer::start_with("127.0.0.1", Validity::NotYet, false);
    assert_says(
        &early.steady().build().unwrap_err(),
        &early.url(),
        "no TLS connection: ADDR has a certificate that is not valid yet; set this machine's clock",
    );
    let strict = TlsServer::start_with("127.0.0.1", Validity::Now, true);
    assert_says(
        &strict.steady().build().unwrap_err(),
        &strict.url(),
        "no TLS connection: ADDR requires a client certificate; give one with TlsConfig::client_certificate_pem",
    );
}

/// The mistakes that `openssl` makes easy.
#[test]
fn faults_of_certificates_are_named() {
    type Make = fn(&Authority) -> Certificate;
    let make: [(Make, &str); 4] = [
        (
            |authority| authority.of_version_1("127.0.0.1"),
            "has a certificate of X.509 version 1, which is not supported; issue one of version 3, with a \
             subjectAltName (`openssl x509 -req` needs `-extfile`)",
        ),
        (
            |authority| authority.without_alternative_names("127.0.0.1"),
            "has a certificate without a subjectAltName, and a common name does not count; issue one with 127.0.0.1 \
             as subjectAltName",
        ),
        (
            |authority| authority.of_authority("127.0.0.1"),
            "has a certificate of an authority (CA:TRUE) as its own; issue a certificate for the server, with \
             CA:FALSE and a subjectAltName, and give the authority's with TlsConfig::ca_pem",
        ),
        (
            |authority| authority.of_server("redis.internal", Validity::Now),
            "has a certificate that is not for \"127.0.0.1\", but for redis.internal; use the name it is for in the \
             URL or in TlsConfig::server_name",
        ),
    ];
    for (make, fault) in make {
        let authority = Authority::new();
        let files = authority.files(make(&authority), false);
        let server = Server::builder().tls(files).start().unwrap();
        let url = server.tls_url().unwrap();
        let tls = TlsConfig::new().ca_pem(authority.pem.as_str());
        let error = steady(&url).tls(tls).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Tls, "{error}");
        assert_says(&error, &url, &format!("no TLS connection: ADDR {fault}"));
    }
}

#[test]
fn a_password_is_sent_over_tls() {
    let authority = Authority::new();
    let certificate = authority.of_server("127.0.0.1", Validity::Now);
    let server = Server::builder()
        .tls(authority.files(certificate, false))
        .password("a/b@c")
        .start()
        .unwrap();
    let url = server.tls_url().unwrap();
    let ca = TlsConfig::new().ca_pem(authority.pem);
    let client = steady(&url).tls(ca.clone()).build().unwrap();
    client.with_lock("k", || ()).unwrap();
    let without = format!("rediss://127.0.0.1:{}", server.tls_port());
    let error = steady(&without).tls(ca).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

#[test]
fn errors_name_unusable_settings() {
    let tls = TlsServer::start();
    let lazy = |config: TlsConfig| steady(&tls.url()).tls(config).build_lazy().unwrap_err();
    let new = TlsConfig::new;
    assert_invalid(lazy(new().ca_pem("no PEM")), "ca_pem has no certificate");
    assert_invalid(lazy(new().ca_pem("")), "ca_pem has no certificate");
    let own = tls.authority.of_client();
    let pair = new().client_certificate_pem(own.key.as_str(), own.key.as_str());
    assert_invalid(lazy(pair), "client_certificate_pem has no certificate");
    let pair = new().client_certificate_pem(own.chain.as_str(), own.chain.as_str());
    assert_invalid(lazy(pair), "client_certificate_pem has no private key");
    assert_invalid(lazy(new().server_name("a b")), "server_name must be");
    let plain = steady("redis://127.0.0.1:1").tls(new());
    assert_invalid(plain.build_lazy().unwrap_err(), "an address without TLS");
    let insecure = format!("{}/#insecure", tls.url());
    assert_invalid(
        Client::open(insecure).unwrap_err(),
        "without a check of certificates",
    );
    let shown = format!(
        "{:?}",
        tls.trusted().client_certificate_pem(own.chain, own.key)
    );
    assert!(!shown.contains("BEGIN") && shown.len() < 200, "{shown}");
}
