//! The connection on which Redis speaks without being asked: RESP3, with tracking of all that is read
//! on it and a channel of this client's own. Knows nothing of who wants to hear what.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, Parser, Value};

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::store::connect::{
    LOGIN_REPEATED, address, by_redis, classify, refusal, repeats_login, shape,
};

/// A socket of either kind; clones share it.
pub(super) enum Socket {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

impl Socket {
    fn connect(addr: &ConnectionAddr, timeout: Duration) -> io::Result<Self> {
        match addr {
            ConnectionAddr::Tcp(host, port) => {
                let deadline = Moment::now().after(timeout);
                let mut failed = io::Error::other("the host's name has no address");
                for address in (host.as_str(), *port).to_socket_addrs()? {
                    let left = deadline.since(Moment::now()).max(Duration::from_millis(1));
                    match TcpStream::connect_timeout(&address, left) {
                        Ok(stream) => {
                            stream.set_nodelay(true)?;
                            return Ok(Self::Tcp(stream));
                        }
                        Err(error) => failed = error,
                    }
                }
                Err(failed)
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => UnixStream::connect(path).map(Self::Unix),
            _ => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kind of address cannot be subscribed to",
            )),
        }
    }

    fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
            #[cfg(unix)]
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
        }
    }

    fn set_read_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(Some(timeout)),
            #[cfg(unix)]
            Self::Unix(stream) => stream.set_read_timeout(Some(timeout)),
        }
    }

    fn set_write_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_write_timeout(Some(timeout)),
            #[cfg(unix)]
            Self::Unix(stream) => stream.set_write_timeout(Some(timeout)),
        }
    }

    /// Ends reading and writing for all clones, whatever they are waiting for.
    pub(super) fn shut_down(&self) {
        // One that has been closed by the other side already is as good.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            #[cfg(unix)]
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.write_all(bytes),
            #[cfg(unix)]
            Self::Unix(stream) => stream.write_all(bytes),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            #[cfg(unix)]
            Self::Unix(stream) => stream.read(buffer),
        }
    }
}

/// The reading half, and what has been read of the next value.
pub(super) struct Subscription {
    socket: Socket,
    parser: Parser,
    timeout: Duration,
}

impl Subscription {
    /// Connects, logs in, turns tracking on and subscribes to `channel`. `any_key` is one that this
    /// client may read.
    ///
    /// An error of the kind `Unavailable` or `Timeout` is worth another try soon; any other means
    /// that the server does not offer this.
    pub(super) fn open(
        info: &ConnectionInfo,
        channel: &str,
        any_key: &str,
        timeout: Duration,
    ) -> Result<(Self, Socket), Error> {
        let unavailable = |e: io::Error| {
            let kind = match e.kind() {
                io::ErrorKind::Unsupported => ErrorKind::InvalidConfig,
                _ => ErrorKind::Unavailable,
            };
            Error::new(kind, format!("{}: {e}", address(info)))
        };
        let socket = Socket::connect(info.addr(), timeout).map_err(unavailable)?;
        socket.set_read_timeout(timeout).map_err(unavailable)?;
        socket.set_write_timeout(timeout).map_err(unavailable)?;
        let mut writer = socket.try_clone().map_err(unavailable)?;
        let mut subscription = Self {
            socket,
            parser: Parser::new(),
            timeout,
        };
        let settings = info.redis_settings();
        let mut hello = redis::cmd("HELLO");
        hello.arg("3");
        if let Some(password) = settings.password() {
            let user = settings.username().unwrap_or("default");
            hello.arg("AUTH").arg(user).arg(password);
        }
        hello.arg("SETNAME").arg("leasehold-wakeups");
        let mut select = redis::cmd("SELECT");
        select.arg(settings.db());
        let mut track = redis::cmd("CLIENT");
        track.arg("TRACKING").arg("ON");
        let mut subscribe = redis::cmd("SUBSCRIBE");
        subscribe.arg(channel);
        let mut look = redis::cmd("MGET");
        look.arg(any_key);
        // Clients of a user that may not publish cannot tell one another of their grants: they would miss their
        // turns, and suspect their connections. An empty message is ignored.
        let mut publish = redis::cmd("PUBLISH");
        publish.arg(channel).arg("");
        let select = (settings.db() != 0).then_some(select);
        let commands = [hello].into_iter().chain(select);
        // All that will be asked, once: what is refused is known then. The subscription comes last,
        // since messages may follow it at once.
        for command in commands.chain([redis::cmd("PING"), look, publish, track, subscribe]) {
            let packed = command.get_packed_command();
            writer.send(&packed).map_err(unavailable)?;
            match subscription.next(|| timeout)? {
                Value::ServerError(error) => {
                    let refused = refusal(error.code(), error.details());
                    if !repeats_login(info, &error.to_string()) {
                        return Err(refused);
                    }
                    return Err(Error::new(refused.kind(), LOGIN_REPEATED));
                }
                Value::Push { .. } | Value::Map(_) | Value::Array(_) => {}
                Value::SimpleString(_) | Value::Okay | Value::Int(_) => {}
                other => {
                    let message = format!("unexpected answer to a subscription: {}", shape(&other));
                    return Err(Error::new(ErrorKind::Protocol, message));
                }
            }
        }
        Ok((subscription, writer))
    }

    /// The next value, whatever it is. `before_waiting` is called when all that has come in so far
    /// has been returned, and says how long to wait for more. `Timeout` if nothing came until then;
    /// it may be called again.
    pub(super) fn next(
        &mut self,
        before_waiting: impl FnMut() -> Duration,
    ) -> Result<Value, Error> {
        let source = Source {
            socket: &mut self.socket,
            timeout: &mut self.timeout,
            before_waiting,
        };
        self.parser
            .parse_value(source)
            .map_err(|e| by_redis(classify(&e), e))
    }
}

/// The parser asks it for more only when it has used up what it had.
struct Source<'a, F> {
    socket: &'a mut Socket,
    timeout: &'a mut Duration,
    before_waiting: F,
}

impl<F: FnMut() -> Duration> Read for Source<'_, F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let timeout = (self.before_waiting)();
        if timeout != *self.timeout {
            self.socket.set_read_timeout(timeout)?;
            *self.timeout = timeout;
        }
        loop {
            match self.socket.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}
