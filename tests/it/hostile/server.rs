//! A relay to a real Redis that turns hostile: then it sends other bytes instead of replies.

use std::borrow::Cow;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use leasehold::{Builder, Client};

/// How long the clients of [`Hostile::builder`] wait for a connection, and for a reply.
pub const TIMEOUT: Duration = Duration::from_millis(500);

/// The bytes that a client gets from then on instead of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// A string, one byte per 200 ms.
    Drip,
    /// Small messages that nobody asked for, without a pause.
    Pushes,
    /// A string that does not end.
    Bulk,
    /// A line that does not end.
    Line,
    /// An array that does not end.
    Array,
    /// Arrays in arrays, ever deeper.
    Nested,
    /// A map that does not end.
    Map,
    /// A set that does not end.
    Set,
    /// A message that does not end.
    Push,
    /// A string of 1 GiB, of which nothing comes.
    Announced,
    /// Strings of 4 MB, each of which comes as a whole.
    Whole,
    /// Strings of 1 GiB each, in an array that is no larger than allowed.
    Strings,
}

impl Attack {
    pub const ALL: [Self; 12] = [
        Self::Drip,
        Self::Pushes,
        Self::Bulk,
        Self::Line,
        Self::Array,
        Self::Nested,
        Self::Map,
        Self::Set,
        Self::Push,
        Self::Announced,
        Self::Whole,
        Self::Strings,
    ];

    /// The bytes that come first, and those that come then, again and again.
    fn bytes(self) -> (&'static [u8], &'static [u8]) {
        match self {
            Self::Drip => (b"$1000\r\n", b"x"),
            Self::Pushes => (b"", b">2\r\n+message\r\n:1\r\n"),
            Self::Bulk => (b"$2000000000\r\n", b"x"),
            Self::Line => (b"+", b"x"),
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

/// When it turns hostile to a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Since {
    /// As soon as it is there.
    Connected,
    /// With a request that has this word.
    Word(String),
    /// With the next request after [`Hostile::attack`].
    Told,
}

impl Since {
    pub fn word(word: impl Into<String>) -> Self {
        Self::Word(word.into())
    }
}

/// Made once: a test counts the memory of its process.
static WHOLE_STRING: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let len = 4_000_000;
    format!("${len}\r\n{}\r\n", "x".repeat(len)).into_bytes()
});

struct Plan {
    redis: u16,
    attack: Attack,
    since: Since,
    told: AtomicBool,
    ended: AtomicBool,
}

/// It ends when dropped.
pub struct Hostile {
    port: u16,
    plan: Arc<Plan>,
}

impl Hostile {
    /// In front of the Redis at this port.
    pub fn start(redis: u16, attack: Attack, since: Since) -> Self {
        LazyLock::force(&WHOLE_STRING);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Arc::new(Plan {
            redis,
            attack,
            since,
            told: AtomicBool::new(false),
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

    /// Clients that soon give up.
    pub fn builder(&self) -> Builder {
        let builder = Client::builder(self.url());
        builder.connect_timeout(TIMEOUT).command_timeout(TIMEOUT)
    }

    /// Makes a server with [`Since::Told`] hostile from now on.
    pub fn attack(&self) {
        self.plan.told.store(true, Ordering::Release);
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.plan.ended.store(true, Ordering::Release);
        // Wakes the thread that accepts.
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
                Since::Word(word) => has(&request[..n], word),
                _ => self.told.load(Ordering::Acquire),
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

    /// Until the client has closed the connection.
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

fn has(request: &[u8], word: &str) -> bool {
    let word = format!("\r\n{word}\r\n");
    request
        .windows(word.len())
        .any(|part| part == word.as_bytes())
}
