//! A relay to a real Redis that turns hostile: from then on, it sends the bytes of an attack instead of replies.

use std::borrow::Cow;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use leasehold::{Builder, Client};

/// The connect time-out and the command time-out of the clients of [`Hostile::builder`].
pub const TIMEOUT: Duration = Duration::from_millis(1500);

/// The bytes that a hostile relay sends instead of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// A string, of which one byte comes every 200 ms.
    Drip,
    /// Small push messages without a pause.
    Pushes,
    /// A string that does not end.
    Bulk,
    /// A simple string that does not end.
    SimpleString,
    /// An array that does not end.
    Array,
    /// Arrays in arrays, ever deeper.
    Nested,
    /// A map that does not end.
    Map,
    /// A set that does not end.
    Set,
    /// A push message that does not end.
    Push,
    /// A string of 1 GiB, of which only the header comes.
    Announced,
    /// Complete strings of 4 MB each.
    Whole,
    /// An array whose number of elements is allowed. Its elements are strings of 1 GiB each.
    Strings,
}

impl Attack {
    pub const ALL: [Self; 12] = [
        Self::Drip,
        Self::Pushes,
        Self::Bulk,
        Self::SimpleString,
        Self::Array,
        Self::Nested,
        Self::Map,
        Self::Set,
        Self::Push,
        Self::Announced,
        Self::Whole,
        Self::Strings,
    ];

    /// The bytes that are sent first, and the bytes that are then sent again and again.
    fn bytes(self) -> (&'static [u8], &'static [u8]) {
        match self {
            Self::Drip => (b"$1000\r\n", b"x"),
            Self::Pushes => (b"", b">2\r\n+message\r\n:1\r\n"),
            Self::Bulk => (b"$2000000000\r\n", b"x"),
            Self::SimpleString => (b"+", b"x"),
            Self::Array => (b"*2000000000\r\n", b":1\r\n"),
            Self::Nested => (b"", b"*1\r\n"),
            Self::Map => (b"%1000000000\r\n", b"+k\r\n:1\r\n"),
            Self::Set => (b"~2000000000\r\n", b":1\r\n"),
            Self::Push => (b">2000000000\r\n+message\r\n", b":1\r\n"),
            Self::Announced => (b"$1073741824\r\n", b""),
            Self::Whole => (b"", b""),
            Self::Strings => (b"*1000\r\n", b"$1073741824\r\n"),
        }
    }
}

/// The moment at which a relay turns hostile on a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Since {
    /// When the connection is made.
    Connected,
    /// When a request has a command or an argument that begins with this text.
    Argument(String),
    /// When the next request after [`Hostile::attack`] comes.
    AttackCall,
}

impl Since {
    pub fn argument(argument: impl Into<String>) -> Self {
        Self::Argument(argument.into())
    }
}

/// The string of [`Attack::Whole`]. Made once, since a test counts the memory of its process.
static WHOLE_STRING: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let len = 4_000_000;
    format!("${len}\r\n{}\r\n", "x".repeat(len)).into_bytes()
});

struct Plan {
    redis: u16,
    attack: Attack,
    since: Since,
    attacks: AtomicBool,
    ended: AtomicBool,
}

/// A relay that turns hostile. Dropping it ends the relay.
pub struct Hostile {
    port: u16,
    plan: Arc<Plan>,
}

impl Hostile {
    /// Starts a relay in front of the Redis at the port `redis`.
    pub fn start(redis: u16, attack: Attack, since: Since) -> Self {
        LazyLock::force(&WHOLE_STRING);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Arc::new(Plan {
            redis,
            attack,
            since,
            attacks: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let of_all = Arc::clone(&plan);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if of_all.ended.load(Ordering::Acquire) {
                    return;
                }
                let plan = Arc::clone(&of_all);
                thread::spawn(move || plan.serve(client));
            }
        });
        Self { port, plan }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// A builder of clients with short time-outs.
    pub fn builder(&self) -> Builder {
        let builder = Client::builder(self.url());
        builder.connect_timeout(TIMEOUT).command_timeout(TIMEOUT)
    }

    /// Makes a relay with [`Since::AttackCall`] hostile from now on.
    pub fn attack(&self) {
        self.plan.attacks.store(true, Ordering::Release);
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.plan.ended.store(true, Ordering::Release);
        // Unblocks the thread that accepts connections.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Plan {
    fn serve(&self, mut client: TcpStream) {
        let mut redis = TcpStream::connect(("127.0.0.1", self.redis)).unwrap();
        redis.set_nodelay(true).unwrap();
        client.set_nodelay(true).unwrap();
        let mut replies = redis.try_clone().unwrap();
        let mut to_client = client.try_clone().unwrap();
        let relay = thread::spawn(move || {
            let _ = std::io::copy(&mut replies, &mut to_client);
        });
        let mut request = [0; 16 * 1024];
        let mut is_hostile = self.since == Since::Connected;
        while !is_hostile {
            let n = client.read(&mut request).unwrap_or(0);
            is_hostile = match &self.since {
                Since::Argument(argument) => has(&request[..n], argument),
                _ => self.attacks.load(Ordering::Acquire),
            };
            if n == 0 || is_hostile || redis.write_all(&request[..n]).is_err() {
                break;
            }
        }
        let _ = redis.shutdown(Shutdown::Both);
        relay.join().unwrap();
        if is_hostile {
            self.be_hostile(client);
        }
    }

    /// Sends the bytes of the attack until the client closes the connection, or the relay ends.
    fn be_hostile(&self, mut client: TcpStream) {
        let (first, then) = self.attack.bytes();
        if client.write_all(first).is_err() {
            return;
        }
        let (piece, pause) = match self.attack {
            Attack::Drip => (Cow::Borrowed(then), Duration::from_millis(200)),
            Attack::Whole => (Cow::Borrowed(&**WHOLE_STRING), Duration::ZERO),
            _ => (Cow::Owned(then.repeat(8 * 1024)), Duration::from_millis(10)),
        };
        while !self.ended.load(Ordering::Acquire) && client.write_all(&piece).is_ok() {
            if piece.is_empty() || self.attack == Attack::Drip {
                thread::sleep(pause);
            }
        }
    }
}

/// Whether an argument of the request begins with `argument`.
fn has(request: &[u8], argument: &str) -> bool {
    let argument = format!("\r\n{argument}");
    request
        .windows(argument.len())
        .any(|part| part == argument.as_bytes())
}
