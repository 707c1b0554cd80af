//! A relay in front of a server. It drops or delays what the server sends on notification connections, and passes
//! everything else on. The client does not notice.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;

use crate::support::millis;

/// How the relay treats the server's messages on notification connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Delivery {
    Pass,
    /// The relay drops messages. A connection that has lost one message delivers no later ones, as if the network had
    /// failed in this direction.
    Lost,
    HeldBack,
}

pub struct Relay {
    port: u16,
    delivery: Arc<AtomicU8>,
    ended: Arc<AtomicBool>,
}

impl Relay {
    pub fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let delivery = Arc::new(AtomicU8::new(Delivery::Pass as u8));
        let ended = Arc::new(AtomicBool::new(false));
        let relay = Self {
            port,
            delivery: Arc::clone(&delivery),
            ended: Arc::clone(&ended),
        };
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if ended.load(Ordering::Acquire) {
                    return;
                }
                // Without a server the client sees its connection closed.
                if let Ok(server) = TcpStream::connect(("127.0.0.1", server_port)) {
                    connect(client, server, &delivery);
                }
            }
        });
        relay
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sets the fate of all messages from now on; messages held back are delivered.
    pub fn set_delivery(&self, delivery: Delivery) {
        self.delivery.store(delivery as u8, Ordering::Release);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.set_delivery(Delivery::Pass);
        self.ended.store(true, Ordering::Release);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Passes bytes on between both ends until one of them is closed.
fn connect(client: TcpStream, server: TcpStream, delivery: &Arc<AtomicU8>) {
    let is_listening = Arc::new(AtomicBool::new(false));
    let [client, server] = [client, server].map(|stream| {
        stream.set_nodelay(true).unwrap();
        Arc::new(stream)
    });
    let ends = (Arc::clone(&client), Arc::clone(&server));
    let (is_known, delivery) = (Arc::clone(&is_listening), Arc::clone(delivery));
    thread::spawn(move || {
        // The connection's purpose shows in its name, which is among the first bytes.
        pass(&ends.0, &ends.1, |bytes| {
            let name = b"leasehold-notifications";
            if bytes.windows(name.len()).any(|part| part == name) {
                is_known.store(true, Ordering::Release);
            }
            true
        });
    });
    let mut is_lost = false;
    thread::spawn(move || {
        pass(&server, &client, |_| {
            while !is_lost && is_listening.load(Ordering::Acquire) {
                match delivery.load(Ordering::Acquire) {
                    lost if lost == Delivery::Lost as u8 => is_lost = true,
                    held if held == Delivery::HeldBack as u8 => thread::sleep(millis(1)),
                    _ => return true,
                }
            }
            !is_lost
        });
    });
}

/// Passes on what `passes` allows, until the sender ends or the receiver has gone.
fn pass(mut from: &TcpStream, mut to: &TcpStream, mut passes: impl FnMut(&[u8]) -> bool) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..length];
        if passes(bytes) && to.write_all(bytes).is_err() {
            break;
        }
    }
    for stream in [from, to] {
        // Fails if the end is closed already.
        let _ = stream.shutdown(Shutdown::Both);
    }
}
