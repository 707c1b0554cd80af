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

    /// A server's certificate with `name` as its common name only, without a subjectAltName.
    pub fn without_alternative_names(&self, name: &str) -> Certificate {
        let (key, mut params) = (
            KeyPair::generate().unwrap(),
            CertificateParams::new(Vec::new()).unwrap(),
        );
        params.distinguished_name = named(name);
        self.sign(&params, &key)
    }

    /// The certificate of another authority, for `name`, which a server may use as its own.
    pub fn of_authority(&self, name: &str) -> Certificate {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        self.sign(&params, &key)
    }

    /// A server's certificate of X.509 version 1, as `openssl x509 -req` makes without `-extfile`. Its signature is
    /// wrong, but a client refuses the version first.
    pub fn of_version_1(&self, name: &str) -> Certificate {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = named(name);
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        Certificate {
            chain: pem_of(&without_version_3(signed.der())),
            key: key.serialize_pem(),
        }
    }

    fn sign(&self, params: &CertificateParams, key: &KeyPair) -> Certificate {
        Certificate {
            chain: params.signed_by(key, &self.issuer).unwrap().pem(),
            key: key.serialize_pem(),
        }
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
        self.sign(&params, &key)
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

/// The DER elements in `bytes`, each with its tag and length, and the content of each.
fn elements(mut bytes: &[u8]) -> Vec<(&[u8], &[u8])> {
    let mut found = Vec::new();
    while let [_, length, ..] = *bytes {
        let (digits, first) = match length {
            0x80.. => (usize::from(length - 0x80), 0),
            _ => (0, usize::from(length)),
        };
        let begin = 2 + digits;
        let length = bytes[2..begin]
            .iter()
            .fold(first, |length, digit| length << 8 | usize::from(*digit));
        let (element, rest) = bytes.split_at(begin + length);
        found.push((element, &element[begin..]));
        bytes = rest;
    }
    found
}

/// A DER sequence of these elements.
fn sequence(content: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(content.len()).unwrap().to_be_bytes();
    // DER needs the shortest form.
    let header = match (high, low) {
        (0, ..0x80) => vec![0x30, low],
        (0, _) => vec![0x30, 0x81, low],
        _ => vec![0x30, 0x82, high, low],
    };
    [&header, content].concat()
}

/// The certificate without its version, which makes it one of version 1, and without its extensions.
fn without_version_3(certificate: &[u8]) -> Vec<u8> {
    const VERSION: u8 = 0xa0;
    const EXTENSIONS: u8 = 0xa3;
    let [(_, certificate)] = elements(certificate)[..] else {
        panic!("a certificate is one sequence");
    };
    let [(_, content), algorithm, signature] = elements(certificate)[..] else {
        panic!("a certificate has three parts");
    };
    let kept = elements(content)
        .into_iter()
        .map(|(element, _)| element)
        .filter(|element| ![VERSION, EXTENSIONS].contains(&element[0]));
    let content = sequence(&kept.collect::<Vec<_>>().concat());
    sequence(&[&content[..], algorithm.0, signature.0].concat())
}

fn pem_of(der: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in der.chunks(48) {
        for three in line.chunks(3) {
            let byte = |n: usize| u32::from(three.get(n).copied().unwrap_or(0));
            let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
            for n in 0..4 {
                let digit = DIGITS[(bits >> (18 - 6 * n) & 63) as usize];
                text.push(if n <= three.len() {
                    char::from(digit)
                } else {
                    '='
                });
            }
        }
        text.push('\n');
    }
    text + "-----END CERTIFICATE-----\n"
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}
