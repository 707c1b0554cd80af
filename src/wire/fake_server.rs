//! Servers and a proxy for tests, on real sockets. A closure handles each connection. They do not parse commands.

use std::io::{Read as _, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

/// Starts a server that calls `serve` with its first connection. Returns the server's address.
pub fn start(serve: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || serve(listener.accept().unwrap().0));
    address
}

/// Keeps the connection open until the process ends, without reading or writing.
pub fn stay_open(connection: TcpStream) {
    std::mem::forget(connection);
}

/// How a server fails to finish a reply.
#[derive(Clone, Copy, Debug)]
pub enum Stall {
    /// Sends nothing more.
    Silence,
    /// Sends a long string, one byte per millisecond.
    Drip,
}

impl Stall {
    pub const ALL: [Self; 2] = [Self::Silence, Self::Drip];
}

/// Starts a server that sends `first` on its first connection, then stalls.
pub fn stalling(first: &[u8], stall: Stall) -> SocketAddr {
    let first = first.to_vec();
    start(move |mut connection| {
        connection.write_all(&first).unwrap();
        match stall {
            Stall::Silence => stay_open(connection),
            Stall::Drip => {
                connection.write_all(b"$60000\r\n").unwrap();
                trickle(connection, b"x");
            }
        }
    })
}

/// Sends `piece` each millisecond until the client has closed the connection.
pub fn trickle(mut connection: TcpStream, piece: &[u8]) {
    while connection.write_all(piece).is_ok() {
        thread::park_timeout(Duration::from_millis(1));
    }
}

/// Starts a proxy to the local port `to`. It passes on what `on_reply` makes of each piece of a reply. Returns the
/// proxy's port.
pub fn proxy(to: u16, on_reply: impl Fn(&[u8]) -> Vec<u8> + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).unwrap();
            let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut from, &mut into));
            let on_reply = on_reply.clone();
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = server.read(&mut bytes) {
                    if client.write_all(&on_reply(&bytes[..count])).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// Makes a socket that listens and accepts nothing. The system accepts the first connections for the socket, and does
/// not answer later attempts to connect.
pub fn accepts_nothing() -> (Socket, SocketAddr) {
    let (socket, address) = bound();
    socket.listen(0).unwrap();
    (socket, address)
}

/// Makes a socket that does not listen. While it lives, no other socket gets its address, so connections are refused.
pub fn refuses_connections() -> (Socket, SocketAddr) {
    bound()
}

fn bound() -> (Socket, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&any.into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}
