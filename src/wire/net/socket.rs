//! A socket to Redis. Connecting, writing, and reading a whole reply each end by a deadline.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::io;
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use redis::{ConnectionAddr, RedisResult, Value};
use socket2::{SockAddr, Socket, TcpKeepalive, Type};

use crate::report::error::Error;
use crate::util::clock::MonotonicTime;
#[cfg(feature = "tls")]
use crate::wire::net::cipher::{Decryptor, Encryptor, LONGEST_TEXT};
use crate::wire::net::replies::{Limit, Replies};

/// The shortest time-out of a socket. Zero would mean no time-out.
const SHORTEST: Duration = Duration::from_millis(1);
/// The client does not set a socket's time-out again for a difference of this time or less, which saves a system call.
/// It repeats a read or write that ends too early.
const SLACK: Duration = Duration::from_millis(10);

/// TCP keepalive: the system probes a connection after this time without traffic, and again after each interval. A
/// connection with this many unanswered probes in a row is closed. Most load balancers count a probe as traffic.
const KEEPALIVE_TIME: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

/// A step of [`connect`].
#[derive(Clone, Copy, Debug)]
pub enum ConnectStep {
    LookUp,
    Connect,
}

/// The reason why connecting failed.
#[derive(Debug)]
pub enum ConnectError {
    /// The resolver found no address for the host.
    Resolve(io::Error),
    /// The lookup of the host took this long and used up the time to connect.
    SlowLookup(Duration),
    /// Every address of the host refused the connection or did not reply.
    Connect(io::Error),
}

impl ConnectError {
    /// Whether no process listens at the address.
    pub fn nothing_listens(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Connect(error) if matches!(error.kind(), ConnectionRefused | NotFound))
    }

    fn is_timeout(&self) -> bool {
        use io::ErrorKind::{TimedOut, WouldBlock};
        matches!(self, Self::Connect(error) if matches!(error.kind(), TimedOut | WouldBlock))
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        Self::Connect(error)
    }
}

/// Connects by `deadline`, without a TLS handshake. (The resolver of host names has its own time-outs.) Calls `enter`
/// at the beginning of each step.
pub fn connect(
    addr: &ConnectionAddr,
    deadline: MonotonicTime,
    enter: impl Fn(ConnectStep),
) -> Result<(Sender, Receiver), ConnectError> {
    let socket = match addr {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            enter(ConnectStep::LookUp);
            let begun = MonotonicTime::now();
            let addresses = (host.as_str(), *port).to_socket_addrs();
            let addresses: Vec<SocketAddr> = addresses.map_err(ConnectError::Resolve)?.collect();
            if begun < deadline && left_until(deadline).is_none() {
                let took = MonotonicTime::now().since(begun);
                return Err(ConnectError::SlowLookup(took));
            }
            enter(ConnectStep::Connect);
            let socket = connect_to_any(&addresses, deadline)?;
            // With Nagle's algorithm, the system would hold an acquire back until the server's system has acknowledged
            // the release before it.
            socket.set_tcp_nodelay(true)?;
            keep_alive(&socket);
            socket
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => {
            enter(ConnectStep::Connect);
            connect_to(&SockAddr::unix(path)?, deadline)?
        }
        _ => {
            let message = "this kind of address is not supported";
            return Err(io::Error::new(io::ErrorKind::Unsupported, message).into());
        }
    };
    let socket = Arc::new(socket);
    let sender = Sender {
        plain: PlainSender {
            socket: Arc::clone(&socket),
            timeout: None,
            used_at: MonotonicTime::now(),
        },
        #[cfg(feature = "tls")]
        encryptor: None,
    };
    let receiver = Receiver {
        socket,
        timeout: None,
        last_past_deadline: None,
        replies: Replies::new(),
        #[cfg(feature = "tls")]
        decryptor: None,
    };
    Ok((sender, receiver))
}

/// Switches TCP keepalive on, if the system supports it.
fn keep_alive(socket: &Socket) {
    let probes = TcpKeepalive::new().with_time(KEEPALIVE_TIME);
    #[cfg(any(unix, windows))]
    let probes = probes.with_interval(KEEPALIVE_INTERVAL);
    #[cfg(any(unix, windows))]
    let probes = probes.with_retries(KEEPALIVE_PROBES);
    let _ = socket.set_tcp_keepalive(&probes);
}

/// Tries the addresses of a host in turn. Each address has only a part of the remaining time, so that a silent address
/// does not use up all of it.
fn connect_to_any(
    addresses: &[SocketAddr],
    deadline: MonotonicTime,
) -> Result<Socket, ConnectError> {
    let without_address = io::Error::other("the host's name has no address");
    let mut failure = ConnectError::Resolve(without_address);
    for (address, left) in addresses.iter().zip((1..=addresses.len()).rev()) {
        let now = MonotonicTime::now();
        let share = deadline.since(now) / u32::try_from(left).unwrap_or(u32::MAX);
        match connect_to(&(*address).into(), now.after(share)) {
            Ok(socket) => return Ok(socket),
            // A silent server may be starting, so its time-out stays the error, even if another address refuses.
            Err(_) if failure.is_timeout() => {}
            Err(error) => failure = error.into(),
        }
    }
    Err(failure)
}

fn connect_to(address: &SockAddr, deadline: MonotonicTime) -> io::Result<Socket> {
    let socket = Socket::new(address.domain(), Type::STREAM, None)?;
    connect_socket(&socket, address, deadline)?;
    Ok(socket)
}

fn connect_socket(socket: &Socket, address: &SockAddr, deadline: MonotonicTime) -> io::Result<()> {
    let left = left_until(deadline).ok_or(io::ErrorKind::TimedOut)?;
    socket.connect_timeout(address, left.max(SHORTEST))?;
    if is_connected_to_itself(socket) {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(())
}

/// Whether the socket is connected to itself. TCP allows this if nothing listens at a local port, and the system has
/// chosen the same port for the socket's own end.
fn is_connected_to_itself(socket: &Socket) -> bool {
    let address = |found: io::Result<SockAddr>| found.ok()?.as_socket();
    let own = address(socket.local_addr());
    own.is_some() && own == address(socket.peer_addr())
}

/// The writing half of a connection.
pub struct Sender {
    plain: PlainSender,
    #[cfg(feature = "tls")]
    encryptor: Option<Encryptor>,
}

/// The part of a [`Sender`] that writes to the socket.
struct PlainSender {
    socket: Arc<Socket>,
    /// The time-out that is set on the socket.
    timeout: Option<Duration>,
    /// When a write last began.
    used_at: MonotonicTime,
}

impl Sender {
    /// When the connection was last used: when it was connected, a write began, or [`mark_used`](Self::mark_used) was
    /// called.
    pub fn used_at(&self) -> MonotonicTime {
        self.plain.used_at
    }

    pub fn mark_used(&mut self) {
        self.plain.used_at = MonotonicTime::now();
    }

    /// Writes all of `bytes`. After an error, a part of them may have been written, and the connection cannot be used
    /// again.
    pub fn send(&mut self, bytes: &[u8], deadline: MonotonicTime) -> io::Result<()> {
        let mut attempt = Attempt::First;
        #[cfg(feature = "tls")]
        if let Some(encryptor) = &mut self.encryptor {
            for text in bytes.chunks(LONGEST_TEXT) {
                let records = encryptor.encrypt(text)?;
                self.plain.write(records, &mut attempt, deadline)?;
            }
            return Ok(());
        }
        self.plain.write(bytes, &mut attempt, deadline)
    }

    /// Encrypts all bytes that are sent afterwards.
    #[cfg(feature = "tls")]
    pub fn encrypt_with(&mut self, encryptor: Encryptor) {
        self.encryptor = Some(encryptor);
    }

    /// Writes all of `bytes` without encryption.
    #[cfg(feature = "tls")]
    pub fn send_plain(&mut self, bytes: &[u8], deadline: MonotonicTime) -> io::Result<()> {
        self.plain.write(bytes, &mut Attempt::First, deadline)
    }

    /// A handle that closes the socket from another thread.
    pub fn closer(&self) -> Closer {
        Closer(Arc::downgrade(&self.plain.socket))
    }
}

impl PlainSender {
    /// Writes all of `bytes`.
    fn write(
        &mut self,
        mut bytes: &[u8],
        attempt: &mut Attempt,
        deadline: MonotonicTime,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            let set = |timeout| self.socket.set_write_timeout(Some(timeout));
            self.used_at = attempt.set_timeout(&mut self.timeout, deadline, set)?;
            match write_once(&self.socket, bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(error) if may_be_retried(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Writes once to the socket. All writes of the library use this function. `MSG_NOSIGNAL` prevents a `SIGPIPE`, which
/// could end the process if the server has closed the connection.
#[cfg(all(unix, not(target_vendor = "apple")))]
fn write_once(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    use rustix::net::{SendFlags, send};
    Ok(send(socket, bytes, SendFlags::NOSIGNAL)?)
}

/// Writes once to the socket. Apple's systems send no `SIGPIPE`, since `Socket::new` sets `SO_NOSIGPIPE` there; Windows
/// has no such signal.
#[cfg(not(all(unix, not(target_vendor = "apple"))))]
fn write_once(mut socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    io::Write::write(&mut socket, bytes)
}

/// The reading half of a connection.
pub struct Receiver {
    socket: Arc<Socket>,
    /// The time-out that is set on the socket.
    timeout: Option<Duration>,
    /// The deadline of the last read that began after its deadline. One such late read is allowed for each deadline.
    last_past_deadline: Option<MonotonicTime>,
    replies: Replies,
    #[cfg(feature = "tls")]
    decryptor: Option<Decryptor>,
}

impl Receiver {
    /// Reads the next reply or push message, of `limit` bytes at most: see [`Replies::next`].
    pub fn receive(&mut self, deadline: MonotonicTime, limit: Limit) -> RedisResult<Value> {
        self.receive_any(deadline, limit, |_| true)
    }

    /// Reads the next reply, and skips push messages.
    pub fn receive_reply(&mut self, deadline: MonotonicTime, limit: Limit) -> RedisResult<Value> {
        self.receive_any(deadline, limit, |value| {
            !matches!(value, Value::Push { .. })
        })
    }

    fn receive_any(
        &mut self,
        deadline: MonotonicTime,
        limit: Limit,
        is_wanted: impl Fn(&Value) -> bool,
    ) -> RedisResult<Value> {
        let mut attempt = Attempt::First;
        loop {
            match self.received(limit)? {
                Some(value) if is_wanted(&value) => return Ok(value),
                Some(_) => {}
                None => self.read(&mut attempt, deadline, limit)?,
            }
        }
    }

    /// The next reply or push message, if all of it was read from the socket before.
    pub fn received(&mut self, limit: Limit) -> RedisResult<Option<Value>> {
        self.replies.next(limit)
    }

    /// The size of the last reply, as the limit counts it.
    pub fn last_size(&self) -> usize {
        self.replies.last_size()
    }

    /// The bytes that were read after the last returned reply.
    pub fn unparsed(&self) -> &[u8] {
        self.replies.unparsed()
    }

    pub fn socket(&self) -> Arc<Socket> {
        Arc::clone(&self.socket)
    }

    /// Whether a part of a reply was read.
    pub fn has_partial_reply(&self) -> bool {
        self.replies.has_partial_reply()
    }

    /// Reads once from the socket. Blocks until bytes come, or until `deadline`.
    pub fn wait(&mut self, deadline: MonotonicTime, limit: Limit) -> io::Result<()> {
        self.read(&mut Attempt::First, deadline, limit)
    }

    /// Reads once from the socket, and decrypts.
    fn fill(&mut self, limit: Limit) -> io::Result<()> {
        #[cfg(feature = "tls")]
        if let Some(decryptor) = &mut self.decryptor {
            return self.replies.fill(limit, decryptor.reader(&self.socket));
        }
        self.replies.fill(limit, &*self.socket)
    }

    /// Reads once from the socket, without decryption, by `deadline`. Returns 0 if the server has closed the
    /// connection.
    #[cfg(feature = "tls")]
    pub fn read_plain(&mut self, into: &mut [u8], deadline: MonotonicTime) -> io::Result<usize> {
        let mut attempt = Attempt::Later;
        loop {
            let set = |timeout| self.socket.set_read_timeout(Some(timeout));
            attempt.set_timeout(&mut self.timeout, deadline, set)?;
            match io::Read::read(&mut &*self.socket, into) {
                Err(error) if may_be_retried(&error) => {}
                read => return read,
            }
        }
    }

    /// Decrypts all bytes that are read afterwards.
    #[cfg(feature = "tls")]
    pub fn decrypt_with(&mut self, decryptor: Decryptor) {
        self.decryptor = Some(decryptor);
    }

    /// The error of TLS, if TLS has failed.
    #[cfg(feature = "tls")]
    pub fn tls_failure(&self) -> Option<&rustls::Error> {
        self.decryptor.as_ref()?.failure()
    }

    fn read(
        &mut self,
        attempt: &mut Attempt,
        deadline: MonotonicTime,
        limit: Limit,
    ) -> io::Result<()> {
        // Only one late read is allowed for each deadline. Otherwise a server could send replies without end, each just
        // in time for the next late read.
        let is_past = left_until(deadline).is_none();
        if is_past && self.last_past_deadline.replace(deadline) == Some(deadline) {
            *attempt = Attempt::Later;
        }
        loop {
            let set = |timeout| self.socket.set_read_timeout(Some(timeout));
            attempt.set_timeout(&mut self.timeout, deadline, set)?;
            match self.fill(limit) {
                Ok(()) => return Ok(()),
                Err(error) if may_be_retried(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Waits until a socket is readable or closed, and returns the positions of those that are. The list is empty if the
/// time `until` comes first, or if `poll` fails, as after a signal.
#[cfg(unix)]
pub fn wait_for_any<'a>(
    sockets: impl Iterator<Item = &'a Arc<Socket>>,
    until: MonotonicTime,
) -> Vec<usize> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let polled = sockets.map(|socket| PollFd::new(socket, PollFlags::IN));
    let mut polled: Vec<PollFd<'_>> = polled.collect();
    let left = until.since(MonotonicTime::now());
    let timeout = Timespec::try_from(left).unwrap_or_default();
    if poll(&mut polled, Some(&timeout)).is_err() {
        return Vec::new();
    }
    let is_ready = |position: &usize| !polled[*position].revents().is_empty();
    (0..polled.len()).filter(is_ready).collect()
}

/// Never called: systems without `poll` have no senders.
#[cfg(not(unix))]
pub fn wait_for_any<'a>(_: impl Iterator<Item = &'a Arc<Socket>>, _: MonotonicTime) -> Vec<usize> {
    unreachable!("no request was sent")
}

/// Closes a socket for reading and writing, from any thread. Does not keep the socket open.
#[derive(Clone)]
pub struct Closer(Weak<Socket>);

impl Closer {
    pub fn close(&self) {
        if let Some(socket) = self.0.upgrade() {
            // An error means that the server has already closed the connection.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    pub fn is_same(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.0, &other.0)
    }

    /// Whether one of the halves of the socket still exists.
    pub fn is_open(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// The sockets of one task. Another thread can close all of them. A socket that is registered after that is closed at
/// once.
#[derive(Default)]
pub struct Sockets(Mutex<SocketsState>);

#[derive(Default)]
struct SocketsState {
    is_closed: bool,
    open: Vec<Closer>,
}

impl Sockets {
    /// Registers a socket for [`close`](Self::close). After `close`, closes the socket and returns an error.
    pub fn register(&self, socket: Closer) -> Result<(), Error> {
        let mut state = self.0.lock();
        if state.is_closed {
            socket.close();
            return Err(Error::client_ended());
        }
        state.open.retain(Closer::is_open);
        state.open.push(socket);
        Ok(())
    }

    /// Forgets a socket, which then stays open.
    pub fn forget(&self, socket: &Closer) {
        self.0.lock().open.retain(|other| !other.is_same(socket));
    }

    /// Closes the registered sockets. Others may be registered afterwards.
    pub fn close_open(&self) {
        self.0.lock().open.iter().for_each(Closer::close);
    }

    pub fn close(&self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        state.open.drain(..).for_each(|socket| socket.close());
    }

    /// Returns an error after [`close`](Self::close).
    pub fn check(&self) -> Result<(), Error> {
        if self.0.lock().is_closed {
            return Err(Error::client_ended());
        }
        Ok(())
    }

    /// The number of registered sockets that are open.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        let state = self.0.lock();
        state.open.iter().filter(|socket| socket.is_open()).count()
    }
}

/// The next system call of a read or write.
enum Attempt {
    /// The first call. It is made even after the deadline: a busy machine may run this thread late although the reply
    /// came in time.
    First,
    /// A later call. It is made only before the deadline.
    Later,
}

impl Attempt {
    /// Sets the socket's time-out so that the next system call ends by `deadline` or a little later. Returns the
    /// current time, or the error `TimedOut` after the deadline.
    fn set_timeout(
        &mut self,
        current: &mut Option<Duration>,
        deadline: MonotonicTime,
        set: impl FnOnce(Duration) -> io::Result<()>,
    ) -> io::Result<MonotonicTime> {
        let now = MonotonicTime::now();
        let left = deadline.since(now);
        let left = match (&self, (!left.is_zero()).then_some(left)) {
            (Self::First, left) => left.unwrap_or(SHORTEST),
            (_, left) => left.ok_or(io::ErrorKind::TimedOut)?,
        };
        let left = left.max(SHORTEST);
        let is_near = current.is_some_and(|current| current.abs_diff(left) <= SLACK);
        if !is_near {
            set(left)?;
            *current = Some(left);
        }
        *self = Self::Later;
        Ok(now)
    }
}

/// Whether a system call may be repeated after this error. `Attempt::set_timeout` ends the repeats at the deadline.
fn may_be_retried(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn left_until(deadline: MonotonicTime) -> Option<Duration> {
    let left = deadline.since(MonotonicTime::now());
    (!left.is_zero()).then_some(left)
}
