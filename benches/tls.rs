//! The cost of TLS: lock+unlock pairs per second through leasehold and by raw commands, each with and without TLS, on
//! one core. The ratio to the raw commands should be no worse with TLS than without. `unlock()` is compared with raw
//! commands whose replies are both awaited. A dropped guard is compared with a raw release that is not awaited: its
//! reply is read with the reply to the next command. Does not measure handshakes.
//!
//! Each round measures all ways in turn, so that other load on the machine affects all alike.

mod support;

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use leasehold::{Client, Mutex, TlsConfig};
use leasehold_testbed::{Server, TlsFiles};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const ROUNDS: usize = 100;
const ROUND: Duration = Duration::from_millis(50);
const WAYS: usize = 8;
const SCRIPT: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
                      return redis.call('DEL', KEYS[1]) end return 0";
const VALUE: &str = "00000000000000000000000000000001";

#[derive(Parser)]
struct Options {
    #[command(flatten)]
    busy: support::Busy,
    /// Given by `cargo bench`
    #[arg(long, hide = true)]
    bench: bool,
}

/// A lock of raw commands: SET NX PX, and a script that compares and deletes. Each reply is one line.
struct Raw<S> {
    stream: BufReader<S>,
    take: Vec<u8>,
    give: Vec<u8>,
    line: String,
    /// A release is on its way whose reply was not read.
    is_releasing: bool,
}

impl<S: Read + Write> Raw<S> {
    fn new(stream: S, key: &str) -> Self {
        let script = redis::Script::new(SCRIPT);
        let mut take = redis::cmd("SET");
        take.arg(key).arg(VALUE).arg("NX").arg("PX").arg(30_000);
        let mut give = redis::cmd("EVALSHA");
        give.arg(script.get_hash()).arg(1).arg(key).arg(VALUE);
        let mut raw = Self {
            stream: BufReader::new(stream),
            take: take.get_packed_command(),
            give: give.get_packed_command(),
            line: String::new(),
            is_releasing: false,
        };
        let mut load = redis::cmd("SCRIPT");
        let load = load.arg("LOAD").arg(SCRIPT).get_packed_command();
        raw.ask(&load);
        // The reply has two lines: first the length of the hash, then the hash.
        raw.read();
        raw
    }

    fn write(&mut self, command: &[u8]) {
        let stream = self.stream.get_mut();
        stream.write_all(command).expect("the server runs");
        stream.flush().expect("the server runs");
    }

    fn ask(&mut self, command: &[u8]) {
        self.write(command);
        self.read();
    }

    fn read(&mut self) {
        self.line.clear();
        let read = self.stream.read_line(&mut self.line);
        read.expect("the server runs");
    }

    fn pair(&mut self, awaits_release: bool) {
        let (take, give) = (
            std::mem::take(&mut self.take),
            std::mem::take(&mut self.give),
        );
        self.write(&take);
        if std::mem::replace(&mut self.is_releasing, !awaits_release) {
            self.read();
            assert_eq!(self.line, ":1\r\n");
        }
        self.read();
        assert_eq!(self.line, "+OK\r\n");
        self.write(&give);
        if awaits_release {
            self.read();
            assert_eq!(self.line, ":1\r\n");
        }
        (self.take, self.give) = (take, give);
    }
}

/// The files of a server on 127.0.0.1, and the authority that has issued its certificate, as PEM.
fn certificates() -> Result<(TlsFiles, String), rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = params.self_signed(&key)?.pem();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()])?;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let files = TlsFiles {
        certificate: params.signed_by(&key, &issuer)?.pem(),
        key: key.serialize_pem(),
        client_authorities: authority.clone(),
        requires_client_certificates: false,
    };
    Ok((files, authority))
}

fn connect(port: u16) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn encrypted(
    port: u16,
    authority: &str,
) -> Result<StreamOwned<ClientConnection, TcpStream>, Box<dyn Error>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes())?)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("127.0.0.1")?;
    let session = ClientConnection::new(Arc::new(config), name)?;
    Ok(StreamOwned::new(session, connect(port)?))
}

fn dropped(mutex: &Mutex) {
    drop(mutex.lock().expect("nobody else wants the lock"));
}

fn unlocked(mutex: &Mutex) {
    let guard = mutex.lock().expect("nobody else wants the lock");
    guard.unlock().expect("the server runs");
}

/// A way to lock, by its name.
type Way<'a> = (&'static str, Box<dyn FnMut() + 'a>);

/// Pairs per second over one round.
fn rate(pair: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    let mut pairs = 0;
    while start.elapsed() < ROUND {
        pair();
        pairs += 1;
    }
    f64::from(pairs) / start.elapsed().as_secs_f64()
}

/// The value below which `part` of all values are.
fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part) as usize]
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    // `cargo test --benches` only checks that it starts.
    let rounds = if options.bench { ROUNDS } else { 1 };
    let (files, authority) = certificates()?;
    let server = Server::builder().tls(files).start()?;
    println!("{}", support::machine(&server)?);
    let _loops = options.busy.start()?;
    let plain_raw = |key| Ok::<_, Box<dyn Error>>(Raw::new(connect(server.port())?, key));
    let tls_raw =
        |key| Ok::<_, Box<dyn Error>>(Raw::new(encrypted(server.tls_port(), &authority)?, key));
    let (mut awaited, mut piped) = (plain_raw("awaited")?, plain_raw("piped")?);
    let (mut tls_awaited, mut tls_piped) = (tls_raw("awaited")?, tls_raw("piped")?);
    let plain = Client::open(server.url())?.mutex("lock");
    let url = server.tls_url().ok_or("the server has TLS")?;
    let tls = TlsConfig::new().ca_pem(authority.as_str());
    let tls = Client::builder(url).tls(tls).build()?.mutex("lock");
    match support::pin_to_one_core(server.pid())? {
        Some(core) => println!("client and server pinned to core {core}"),
        None => println!("this system cannot pin threads to a core"),
    }
    println!("median of {rounds} rounds of {ROUND:?} of each way, in turn\n");
    // Each raw way stands before the way that is compared with it.
    let mut ways: [Way<'_>; WAYS] = [
        ("raw, both awaited", Box::new(|| awaited.pair(true))),
        ("unlock()", Box::new(|| unlocked(&plain))),
        ("raw, release not awaited", Box::new(|| piped.pair(false))),
        ("guard dropped", Box::new(|| dropped(&plain))),
        (
            "TLS: raw, both awaited",
            Box::new(|| tls_awaited.pair(true)),
        ),
        ("TLS: unlock()", Box::new(|| unlocked(&tls))),
        (
            "TLS: raw, release not awaited",
            Box::new(|| tls_piped.pair(false)),
        ),
        ("TLS: guard dropped", Box::new(|| dropped(&tls))),
    ];
    let mut rates = [const { Vec::new() }; WAYS];
    let mut ratios = [const { Vec::new() }; WAYS];
    for turn in 0..rounds {
        let mut round = [0.0; WAYS];
        for place in 0..WAYS {
            let way = (turn + place) % WAYS;
            round[way] = rate(&mut *ways[way].1);
        }
        for (way, found) in round.into_iter().enumerate() {
            rates[way].push(found);
            ratios[way].push(found / round[way / 2 * 2]);
        }
    }
    let mut table = support::table(["way", "pairs/s", "ratio to raw", "quartiles"]);
    for ((name, _), (rates, ratios)) in ways.iter().zip(rates.iter_mut().zip(&mut ratios)) {
        table.add_row([
            (*name).to_owned(),
            format!("{:.0}", quantile(rates, 0.5)),
            format!("{:.3}", quantile(ratios, 0.5)),
            format!(
                "{:.3} - {:.3}",
                quantile(ratios, 0.25),
                quantile(ratios, 0.75)
            ),
        ]);
    }
    println!("{table}");
    Ok(())
}
