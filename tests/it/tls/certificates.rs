//! Certificates for tests: an authority, and the certificates that it issues.

use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold_testbed::TlsFiles;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, date_time_ymd,
};

static NUMBER: AtomicUsize = AtomicUsize::new(0);

/// An authority that a client or a server may trust.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub pem: String,
}

/// A certificate and its private key, as PEM.
pub struct Certificate {
    pub chain: String,
    pub key: String,
}

/// The time in which a certificate is valid.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    Now,
    Expired,
    NotYet,
}

impl Authority {
    pub fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        // Authorities need different names: a certificate refers to its issuer by name.
        params.distinguished_name = named(&format!(
            "authority {}",
            NUMBER.fetch_add(1, Ordering::Relaxed)
        ));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(params, key);
        Self { issuer, pem }
    }

    /// A server's certificate for `name`, a DNS name or an IP address. Nodes of a Cluster are clients of each other
    /// with this certificate, too, and refuse others.
    pub fn of_server(&self, name: &str, validity: Validity) -> Certificate {
        let server = ExtendedKeyUsagePurpose::ServerAuth;
        let usages = vec![server, ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(name, validity, usages)
    }

    pub fn of_client(&self) -> Certificate {
        let usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue("client", Validity::Now, usages)
    }

    fn issue(
        &self,
        name: &str,
        validity: Validity,
        usages: Vec<ExtendedKeyUsagePurpose>,
    ) -> Certificate {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = usages;
        params.distinguished_name = named(name);
        match validity {
            Validity::Now => {}
            Validity::Expired => params.not_after = date_time_ymd(2001, 1, 1),
            Validity::NotYet => params.not_before = date_time_ymd(4000, 1, 1),
        }
        let chain = params.signed_by(&key, &self.issuer).unwrap().pem();
        Certificate {
            chain,
            key: key.serialize_pem(),
        }
    }

    /// The files of a server that has this certificate, and that accepts clients' certificates of this authority.
    pub fn files(&self, certificate: Certificate, requires_client_certificates: bool) -> TlsFiles {
        TlsFiles {
            certificate: certificate.chain,
            key: certificate.key,
            client_authorities: self.pem.clone(),
            requires_client_certificates,
        }
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}
