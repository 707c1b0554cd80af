//! Servers on real ports that are not Redis, or do not behave like Redis.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

/// The behaviour of a fake server towards each connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Leaves the connection in its backlog, where the kernel has accepted it.
    BacklogOnly,
    /// Accepts, reads, and never replies.
    Mute,
    /// Closes the connection at once.
    Closing,
    /// As a Redis in protected mode: sends an error at once, and closes the connection.
    Protected,
    /// Replies as a web server.
    Http,
    /// Sends the greeting of a mail server, unasked.
    Greeting,
    /// Replies with bytes that mean nothing.
    Garbage,
    /// Replies to every request with the same well-formed reply, which fits none.
    Parrot,
    /// Knows no script, and replies to each `SCRIPT LOAD` with another hash than Redis would.
    OtherHashes,
    /// Begins a reply and never ends it.
    Unending,
    /// Replies to every request with errors that repeat it.
    Echoing,
    /// Accepts a login, and replies to all requests behind it with errors that repeat them.
    EchoingLater,
    /// Replies to every request with very long errors that contain control characters.
    Forging,
}

/// Text that forges a line of a log and hides other lines, unless it is escaped.
pub const FORGED: &str = "x\n\u{1b}[2J\u{7f}\u{85}\u{9b}2J\u{2028}\u{2029}\u{61c}\u{200e}\u{200f}\u{202a}\u{202e}\u{2066}\u{2069}\tx";

/// A fake server; dropping it ends it.
pub struct Fake {
    port: u16,
    connections: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
    /// Open until the end, so that the backlog exists.
    _listener: TcpListener,
}

impl Fake {
    pub fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let ended = Arc::new(AtomicBool::new(false));
        let connections = Arc::new(AtomicUsize::new(0));
        if manner != Manner::BacklogOnly {
            let listener = listener.try_clone().unwrap();
            let (ended, connections) = (Arc::clone(&ended), Arc::clone(&connections));
            thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    if ended.load(Ordering::Acquire) {
                        return;
                    }
                    connections.fetch_add(1, Ordering::AcqRel);
                    let ended = Arc::clone(&ended);
                    thread::spawn(move || serve(stream, manner, &ended));
                }
            });
        }
        Self {
            port,
            connections,
            ended,
            _listener: listener,
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The number of connections accepted so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Acquire)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// A port of 127.0.0.1 on which no server listens. A bound socket occupies the port, so no server can get it while the
/// tests run.
pub fn closed_port() -> u16 {
    // A port that no outgoing connection can get: a client would connect to itself.
    static HELD: LazyLock<(socket2::Socket, u16)> = LazyLock::new(|| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = socket.unwrap();
        let is_bound = |port: &u16| {
            let address = std::net::SocketAddr::from(([127, 0, 0, 1], *port));
            socket.bind(&address.into()).is_ok()
        };
        let port = (9_000..10_000).find(is_bound).expect("a free port");
        (socket, port)
    });
    HELD.1
}

fn serve(mut stream: TcpStream, manner: Manner, ended: &AtomicBool) {
    let turn = Duration::from_millis(100);
    stream.set_read_timeout(Some(turn)).unwrap();
    match manner {
        Manner::Closing => return,
        Manner::Protected => {
            say(
                &mut stream,
                b"-DENIED Redis is running in protected mode ..\r\n",
            );
            return;
        }
        Manner::Greeting => say(&mut stream, b"220 mail.example.com ESMTP ready\r\n"),
        _ => {}
    }
    let mut buffer = [0; 4096];
    while !ended.load(Ordering::Acquire) {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => answer(&mut stream, manner, &buffer[..n]),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return,
        }
    }
}

fn answer(stream: &mut TcpStream, manner: Manner, request: &[u8]) {
    match manner {
        Manner::Http => {
            let text = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 3\r\n\r\nno\n";
            say(stream, text);
            let _ = stream.shutdown(Shutdown::Both);
        }
        Manner::Garbage => say(stream, b"\0\x07\xff\xfe*$+-:\r\n\x1b[2J"),
        Manner::Parrot => say(stream, &b":42\r\n".repeat(16)),
        Manner::OtherHashes if request.starts_with(b"*4\r\n$6\r\nCLIENT") => {
            say(stream, b"+OK\r\n+OK\r\n+OK\r\n*0\r\n");
        }
        Manner::OtherHashes if request.starts_with(b"*11\r\n$6\r\nSCRIPT\r\n$6\r\nEXISTS") => {
            say(stream, format!("*9\r\n{}", ":0\r\n".repeat(9)).as_bytes());
        }
        Manner::OtherHashes if request.starts_with(b"*3\r\n$6\r\nSCRIPT\r\n$4\r\nLOAD") => {
            let hash = format!("$40\r\n{}\r\n", "0".repeat(40));
            say(stream, hash.repeat(9).as_bytes());
        }
        Manner::Echoing | Manner::EchoingLater => {
            if manner == Manner::EchoingLater {
                say(stream, b"+OK\r\n");
            }
            // Redis, too, replaces line breaks in the text of an error.
            let words = String::from_utf8_lossy(request).replace(['\r', '\n'], " ");
            say(
                stream,
                format!("-ERR no such thing: {words}\r\n")
                    .repeat(16)
                    .as_bytes(),
            );
        }
        Manner::Forging => {
            let forged = format!("-LOADING {FORGED}{}\r\n", "x".repeat(100_000));
            say(stream, forged.repeat(16).as_bytes());
        }
        Manner::Unending => say(stream, b"$1000\r\nand so"),
        _ => {}
    }
}

fn say(stream: &mut TcpStream, bytes: &[u8]) {
    // Fails if the connection is closed.
    let _ = stream.write_all(bytes);
}
