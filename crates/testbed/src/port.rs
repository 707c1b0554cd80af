//! Finds free ports for listeners.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The ports for listeners. They are below the ports that Linux and macOS give to outgoing connections. Otherwise a
/// client that tries to connect to a dead server could get the server's port for its own socket, and connect to itself.
/// The server could then not use its port again.
const RANGE: Range<u16> = 10_000..32_000;
/// The distance from the port of a node of a Cluster to the port of its bus.
const BUS_OFFSET: u16 = 10_000;

/// The next port to try. Each process tries all ports before it tries one again. So a server that is down for a moment
/// does not lose its port to a server that starts meanwhile.
static NEXT: LazyLock<AtomicUsize> = LazyLock::new(|| {
    let random = RandomState::new().build_hasher().finish();
    AtomicUsize::new((random % RANGE.len() as u64) as usize)
});

/// A listener on a free port of 127.0.0.1.
pub(crate) fn listen() -> io::Result<TcpListener> {
    let mut outcome = Err(io::Error::other("no port was tried"));
    for _ in RANGE {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed) % RANGE.len();
        let port = RANGE.start + u16::try_from(offset).expect("the range is of u16");
        outcome = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        match &outcome {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            _ => break,
        }
    }
    outcome
}

/// A port that was free a moment ago; another program may still take it first.
pub(crate) fn free() -> io::Result<u16> {
    Ok(listen()?.local_addr()?.port())
}

/// The same as [`free`], for a node of a Cluster: the port of its bus, 10,000 higher, was free, too, and is in the same
/// range.
pub(crate) fn free_with_bus() -> io::Result<u16> {
    let mut outcome = Err(io::Error::other("no port was tried"));
    for _ in RANGE {
        let port = free()?;
        let bus = port + BUS_OFFSET;
        if !RANGE.contains(&bus) {
            continue;
        }
        match TcpListener::bind((Ipv4Addr::LOCALHOST, bus)) {
            Ok(_) => return Ok(port),
            Err(error) => outcome = Err(error),
        }
    }
    outcome
}
