//! A TCP proxy that can make the network fail. The bytes that it delivers are unchanged and in order.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::relay::{Faults, Relay};
use crate::{Error, port};

/// A TCP proxy on 127.0.0.1 in front of a server: real sockets, a thread of its own, and faults that can be
/// switched at any time. When a setter returns, its fault applies to every byte that has not passed yet.
/// Dropping the proxy closes everything.
pub struct Proxy {
    relay: Arc<Relay>,
    thread: Option<JoinHandle<()>>,
    port: u16,
}

impl Proxy {
    /// Starts a proxy in front of the server at `upstream_port` on 127.0.0.1. The server need not run yet:
    /// until then the proxy closes each connection.
    ///
    /// # Errors
    /// The system gives no port or no thread.
    pub fn start(upstream_port: u16) -> Result<Proxy, Error> {
        let listener = port::listen().map_err(failed)?;
        Self::listen(listener, upstream_port)
    }

    /// Starts a proxy in front of the server at `port` on 127.0.0.1. The proxy has the same port, on `host`.
    ///
    /// # Errors
    /// The system does not give this address, or no thread.
    pub(crate) fn start_at(host: Ipv4Addr, port: u16) -> Result<Proxy, Error> {
        let listener = TcpListener::bind((host, port)).map_err(failed)?;
        Self::listen(listener, port)
    }

    fn listen(listener: TcpListener, upstream_port: u16) -> Result<Proxy, Error> {
        let port = listener.local_addr().map_err(failed)?.port();
        let relay = Arc::new(Relay::new(listener, upstream_port).map_err(failed)?);
        let runner = Arc::clone(&relay);
        let thread = thread::Builder::new()
            .name("fault-proxy".into())
            .spawn(move || runner.run());
        Ok(Proxy {
            relay,
            thread: Some(thread.map_err(failed)?),
            port,
        })
    }

    /// `redis://127.0.0.1:PORT`. The proxy knows no password: add it where the server requires one.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The proxy's own port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Delivers every chunk this much later, in each direction. Zero ends the delay, even for bytes in flight.
    pub fn delay(&self, each_way: Duration) {
        self.fault(|faults| faults.delay = each_way);
    }

    /// Holds back the bytes of both directions, and the end of each direction. The proxy still accepts connections.
    /// When this is switched off, the proxy delivers everything in order, even if the client has closed its end
    /// meanwhile.
    pub fn black_hole(&self, on: bool) {
        self.fault(|faults| faults.black_hole = on);
    }

    /// The same as [`black_hole`](Proxy::black_hole), for the direction to the server only.
    pub fn hold_requests(&self, on: bool) {
        self.fault(|faults| faults.hold_requests = on);
    }

    /// The same as [`black_hole`](Proxy::black_hole), for the direction from the server only.
    pub fn hold_replies(&self, on: bool) {
        self.fault(|faults| faults.hold_replies = on);
    }

    /// Cuts one connection, after exactly this many more bytes have gone to the server. The bytes of all clients count,
    /// and the connection that sent the last of them is cut. With `Some(0)`, the next connection that sends anything is
    /// cut, and its bytes are not passed on. `None` cancels the cut.
    pub fn cut_after(&self, bytes_to_server: Option<usize>) {
        self.fault(|faults| faults.cut_after = bytes_to_server);
    }

    /// Closes both ends of every live connection. Bytes held back are lost.
    pub fn cut_all(&self) {
        self.relay.with(|state| state.cut_all());
    }

    /// Waits for `silence`, and then forgets each connection on which no byte has come since the call, as load
    /// balancers do: the proxy delivers no further bytes of these connections, and leaves both ends open. Returns how
    /// many connections it has forgotten.
    pub fn forget_silent(&self, silence: Duration) -> usize {
        let before = self.relay.with(|state| state.traffic());
        thread::sleep(silence);
        self.relay.with(|state| state.forget(&before))
    }

    /// Closes new connections at once; existing ones stay.
    pub fn refuse(&self, on: bool) {
        self.fault(|faults| faults.refuse = on);
    }

    /// Makes the proxy pass new connections to the server at `upstream_port`. Existing connections stay where they are.
    pub fn redirect(&self, upstream_port: u16) {
        self.balance(&[upstream_port]);
    }

    /// Makes the proxy pass new connections to the servers at these ports in turn, as a load balancer does. Existing
    /// connections stay where they are.
    ///
    /// # Panics
    /// There is no port.
    pub fn balance(&self, upstream_ports: &[u16]) {
        assert!(!upstream_ports.is_empty(), "a proxy needs a server");
        self.relay
            .with(|state| state.upstream_ports = upstream_ports.to_vec());
    }

    /// The number of live connections. The connection of a client that has gone stays live while the proxy holds back
    /// some of its bytes.
    pub fn connections(&self) -> usize {
        self.relay.with(|state| state.connections())
    }

    /// The number of bytes inside the proxy: held back, delayed, or not accepted by the receiver.
    pub fn held_bytes(&self) -> usize {
        self.relay.with(|state| state.held_bytes())
    }

    fn fault(&self, change: impl FnOnce(&mut Faults)) {
        self.relay.with(|state| change(&mut state.faults));
    }
}

fn failed(error: io::Error) -> Error {
    Error::io("a proxy on the loopback interface cannot be started", error)
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.relay.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed. Another panic here would hide that of the test.
            let _ = thread.join();
        }
    }
}
