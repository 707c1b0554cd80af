//! TLS on the socket of a connection, by rustls: the handshake, encryption and decryption.
//!
//! One thread may read while another writes. Both use one rustls session under a mutex. Threads do not hold the mutex
//! during a system call, so a read that blocks does not delay writes, and a write that blocks does not delay reads.
//!
//! - The reader reads records from the socket into its own buffer, then passes them to the session. It never writes.
//! - The sender encrypts with the session, then writes the records. Only the sender writes, so records leave in the
//!   order in which they were encrypted. If the session has to reply to a key update, the reply leaves with the next
//!   write, as TLS allows.
//!
//! The deadlines of `socket.rs` apply. A connection is closed without `close_notify`, since a reply of Redis shows its
//! own end: the reader notices a cut reply anyway.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::client::ClientConnection;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};

use crate::config::tls::{ClientCertificate, TlsConfig};
use crate::util::clock::MonotonicTime;
use crate::wire::net::cipher;
use crate::wire::net::socket::{Receiver, Sender};

/// The size of the buffer for records from the socket, in bytes: a record has up to 16 KiB and a header.
const BUFFER: usize = 17 * 1024;

/// The settings of an endpoint's TLS connections.
pub struct Tls {
    config: Arc<ClientConfig>,
    /// The name in the certificates, if it is not the host of each connection.
    server_name: Option<ServerName<'static>>,
}

impl Tls {
    /// Reads the certificates of `settings`, or those of the system. `host` is the host of the URL.
    pub fn new(settings: &TlsConfig, host: &str) -> Result<Self, String> {
        let name = settings.server_name.as_deref();
        let checked = ServerName::try_from(name.unwrap_or(host).to_owned()).map_err(|_| {
            let what = if name.is_some() {
                "tls: server_name"
            } else {
                "tls: the host of the URL"
            };
            format!("{what} must be a DNS name or an IP address")
        })?;
        // The program may have installed a provider for all of its TLS connections, for example a certified one.
        let provider = CryptoProvider::get_default().cloned();
        let provider =
            provider.unwrap_or_else(|| Arc::new(rustls::crypto::ring::default_provider()));
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("tls: {error}"))?
            .with_root_certificates(roots(settings.ca.as_deref())?);
        let config = match &settings.client {
            None => builder.with_no_client_auth(),
            Some(ClientCertificate { chain, key }) => {
                let chain = certificates(chain, "client_certificate_pem")?;
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
                    "tls: client_certificate_pem has no private key in PEM (PKCS#8, PKCS#1 or SEC1)"
                })?;
                builder.with_client_auth_cert(chain, key).map_err(|error| {
                    format!("tls: client_certificate_pem has a key that does not fit: {error}")
                })?
            }
        };
        Ok(Self {
            config: Arc::new(config),
            server_name: name.is_some().then_some(checked),
        })
    }

    /// Does the handshake on a new socket to `host`, by `deadline`. Afterwards, `sender` encrypts and `receiver`
    /// decrypts.
    pub fn start(
        &self,
        host: &str,
        sender: &mut Sender,
        receiver: &mut Receiver,
        deadline: MonotonicTime,
    ) -> Result<(), TlsError> {
        let config = Arc::clone(&self.config);
        let server_name = match &self.server_name {
            Some(name) => name.clone(),
            // A sentinel may have named an invalid host.
            None => ServerName::try_from(host.to_owned())
                .map_err(|_| rustls::Error::General(format!("{host:?} is no name of a server")))?,
        };
        let mut session = ClientConnection::new(config, server_name)?;
        let mut bytes = vec![0; BUFFER];
        let mut has_received = false;
        loop {
            let mut records = Vec::new();
            while session.wants_write() {
                session.write_tls(&mut records)?;
            }
            sender.send_plain(&records, deadline)?;
            if !session.is_handshaking() {
                break;
            }
            let n = match receiver.read_plain(&mut bytes, deadline) {
                Ok(0) => return Err(TlsError::Closed { has_received }),
                Ok(n) => n,
                Err(error) if is_timeout(&error) => return Err(TlsError::Late { has_received }),
                Err(error) => return Err(error.into()),
            };
            has_received = true;
            let mut records = &bytes[..n];
            while !records.is_empty() {
                if session.read_tls(&mut records)? == 0 {
                    return Err(TlsError::Closed { has_received });
                }
                if let Err(error) = session.process_new_packets() {
                    let mut alert = Vec::new();
                    // The alert puts the reason into the server's log. If the alert cannot be sent, the first error
                    // still counts.
                    let _ = session.write_tls(&mut alert);
                    let _ = sender.send_plain(&alert, MonotonicTime::now());
                    return Err(error.into());
                }
            }
        }
        let (encryptor, decryptor) = cipher::pair(session, bytes);
        receiver.decrypt_with(decryptor);
        sender.encrypt_with(encryptor);
        Ok(())
    }

    /// The name that the certificate of a server at `host` must have.
    pub fn server_name<'a>(&'a self, host: &'a str) -> Cow<'a, str> {
        match &self.server_name {
            Some(name) => name.to_str(),
            None => host.into(),
        }
    }
}

fn roots(ca: Option<&[u8]>) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(pem) => {
            for certificate in certificates(pem, "ca_pem")? {
                roots
                    .add(certificate)
                    .map_err(|error| format!("tls: ca_pem has a bad certificate: {error}"))?;
            }
        }
        None => {
            // Some systems have old certificates that rustls cannot read. They are ignored if at least one other can be
            // read.
            let found = rustls_native_certs::load_native_certs();
            if roots.add_parsable_certificates(found.certs).0 == 0 {
                return Err(
                    "tls: the system has no certificates of authorities; give one with TlsConfig::ca_pem"
                        .to_owned(),
                );
            }
        }
    }
    Ok(roots)
}

fn certificates(pem: &[u8], setting: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => Err(format!("tls: {setting} has no certificate in PEM")),
    }
}

/// The reason why a handshake failed. `has_received`: whether the server has sent any bytes.
#[derive(Debug)]
pub enum TlsError {
    /// The server closed the connection.
    Closed { has_received: bool },
    /// The deadline has passed.
    Late { has_received: bool },
    /// The socket failed.
    Io(io::Error),
    /// The server or its certificate is not accepted, or the server does not accept the client.
    Refused(rustls::Error),
}

impl From<io::Error> for TlsError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<rustls::Error> for TlsError {
    fn from(error: rustls::Error) -> Self {
        Self::Refused(error)
    }
}

fn is_timeout(error: &io::Error) -> bool {
    use io::ErrorKind::{TimedOut, WouldBlock};
    matches!(error.kind(), TimedOut | WouldBlock)
}

/// Whether the certificate has other names than that of the server.
pub fn is_about_name(error: &rustls::Error) -> bool {
    use CertificateError::{NotValidForName, NotValidForNameContext};
    matches!(
        error,
        rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. })
    )
}

/// The fault and the next step, for an error's message behind the server's address.
pub fn reason(error: &rustls::Error, server_name: &str) -> String {
    use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage, PeerIncompatible};
    let reason = match error {
        InvalidCertificate(error) => return fault_of_certificate(error, server_name),
        AlertReceived(AlertDescription::CertificateRequired) => {
            "requires a client certificate; give one with TlsConfig::client_certificate_pem"
        }
        AlertReceived(
            alert @ (AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied),
        ) => {
            return format!(
                "refuses the client certificate ({alert:?}); check TlsConfig::client_certificate_pem, and which \
                 authorities the server trusts"
            );
        }
        AlertReceived(alert) => {
            return format!("has refused the TLS handshake ({alert:?}); {CHECK_SETTINGS}");
        }
        PeerIncompatible(why) => {
            return format!(
                "has no TLS settings in common with this client ({why:?}); {CHECK_SETTINGS}"
            );
        }
        InvalidMessage(_) => SERVER_WITHOUT_TLS,
        _ => return format!("breaks the rules of TLS; {CHECK_SETTINGS}"),
    };
    reason.to_owned()
}

/// The [`reason`] for a certificate that the client does not accept.
fn fault_of_certificate(error: &CertificateError, server_name: &str) -> String {
    use CertificateError::{
        BadEncoding, BadSignature, Expired, ExpiredContext, InvalidPurpose, InvalidPurposeContext,
        NotValidForName, NotValidForNameContext, NotValidYet, NotValidYetContext, Other, Revoked,
        UnhandledCriticalExtension, UnknownIssuer,
    };
    let fault = match error {
        Expired | ExpiredContext { .. } => {
            "that has expired; renew it, or set this machine's clock"
        }
        NotValidYet | NotValidYetContext { .. } => {
            "that is not valid yet; set this machine's clock"
        }
        // `BadSignature`: the trusted authority has the name of the certificate's issuer, but another key.
        UnknownIssuer | BadSignature => {
            "of an unknown issuer; give the issuer's certificate with TlsConfig::ca_pem"
        }
        NotValidForNameContext { presented, .. } if presented.is_empty() => {
            return format!(
                "has a certificate without a subjectAltName, and a common name does not count; issue one with \
                 {server_name} as subjectAltName"
            );
        }
        NotValidForName | NotValidForNameContext { .. } => {
            let names = match error {
                NotValidForNameContext { presented, .. } => {
                    format!(", but for {}", presented_names(presented))
                }
                _ => String::new(),
            };
            return format!(
                "has a certificate that is not for {server_name:?}{names}; use the name it is for in the URL or in \
                 TlsConfig::server_name"
            );
        }
        InvalidPurpose | InvalidPurposeContext { .. } => {
            "that is not for servers; give it one for server authentication"
        }
        Revoked => "that was revoked; issue another one",
        BadEncoding => "that cannot be read; issue another one",
        UnhandledCriticalExtension => {
            "with a critical extension that is not supported; issue one without it"
        }
        // rustls has no variants for these errors of its dependency.
        Other(other) => match other.to_string().as_str() {
            "UnsupportedCertVersion" => {
                "of X.509 version 1, which is not supported; issue one of version 3, with a subjectAltName \
                 (`openssl x509 -req` needs `-extfile`)"
            }
            "CaUsedAsEndEntity" => {
                "of an authority (CA:TRUE) as its own; issue a certificate for the server, with CA:FALSE and a \
                 subjectAltName, and give the authority's with TlsConfig::ca_pem"
            }
            other => return unnamed_fault(other),
        },
        // Newer versions of rustls have more variants with this beginning.
        other if format!("{other:?}").starts_with("UnsupportedSignatureAlgorithm") => {
            "whose signature is of a kind that is not supported, as with SHA-1; issue one with SHA-256, and ECDSA \
             P-256 or RSA of 2048 bits"
        }
        other => return unnamed_fault(other),
    };
    format!("has a certificate {fault}")
}

fn unnamed_fault(error: impl fmt::Display) -> String {
    format!("has a certificate that is not accepted ({error}); issue another one")
}

/// The most names of a certificate that an error lists.
const MOST_NAMES: usize = 5;

/// The names that a certificate is for. webpki shows each with its type: `DnsName("h")`, `IpAddress(127.0.0.1)`.
fn presented_names(presented: &[String]) -> String {
    let bare = |name: &String| {
        let inner = name
            .split_once('(')
            .and_then(|(_, rest)| rest.strip_suffix(')'));
        inner.unwrap_or(name).trim_matches('"').to_owned()
    };
    let mut names: Vec<String> = presented.iter().take(MOST_NAMES).map(bare).collect();
    if presented.len() > MOST_NAMES {
        names.push("..".to_owned());
    }
    names.join(", ")
}

const CHECK_SETTINGS: &str = "check its TLS settings (`tls-protocols`, `tls-ciphers`)";

/// The rest of an error's message for a server that does not reply in TLS.
const SERVER_WITHOUT_TLS: &str =
    "does not speak TLS on this port; use its TLS port, or redis:// for one without TLS";

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rcgen::{CertificateParams, CertifiedKey, KeyPair};
    use redis::ConnectionAddr;
    use rustls::pki_types::PrivatePkcs8KeyDer;
    use rustls::{ServerConfig, ServerConnection};

    use std::io::Read;

    use super::*;
    use crate::wire::fake_server;
    use crate::wire::net::socket;

    const HOST: &str = "127.0.0.1";
    const LONG: Duration = Duration::from_secs(20);

    fn certified() -> CertifiedKey<KeyPair> {
        let signing_key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![HOST.to_owned()]).unwrap();
        let cert = params.self_signed(&signing_key).unwrap();
        CertifiedKey { cert, signing_key }
    }

    #[test]
    fn given_authorities_replace_those_of_the_system() {
        let pem = certified().cert.pem();
        assert_eq!(roots(Some(pem.as_bytes())).unwrap().len(), 1);
    }

    /// The peer does not read at first, so the first write times out in the middle of a TLS record.
    #[test]
    fn a_long_text_is_sent_in_records() {
        let CertifiedKey { cert, signing_key } = certified();
        let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key.into())
            .unwrap();
        // All 4-byte parts differ, so a lost or repeated part is noticed.
        let text: Vec<u8> = (0..4_000_000_u32).flat_map(u32::to_le_bytes).collect();
        let (send_received, received) = channel();
        let len = text.len();
        let address = fake_server::start(move |mut stream| {
            let mut session = ServerConnection::new(Arc::new(config)).unwrap();
            while session.is_handshaking() {
                session.complete_io(&mut stream).unwrap();
            }
            let mut read = vec![0; len];
            let mut stream = rustls::Stream::new(&mut session, &mut stream);
            send_received
                .send(stream.read_exact(&mut read).map(|()| read))
                .unwrap();
        });
        let deadline = MonotonicTime::now().after(LONG);
        let address = ConnectionAddr::Tcp(HOST.to_owned(), address.port());
        let (mut sender, mut receiver) = socket::connect(&address, deadline, |_| ()).unwrap();
        let settings = TlsConfig::new().ca_pem(cert.pem());
        let tls = Tls::new(&settings, HOST).unwrap();
        tls.start(HOST, &mut sender, &mut receiver, deadline)
            .unwrap();

        sender.send(&text, deadline).unwrap();
        assert!(received.recv().unwrap().unwrap() == text);
    }
}
