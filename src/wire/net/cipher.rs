//! Encrypts and decrypts the bytes of a connection with TLS, once its handshake is done.

use std::io::{self, Read, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::client::ClientConnection;
use socket2::Socket;

/// The longest text to encrypt at a time, in bytes: less than a session buffers. A longer write takes several system
/// calls.
pub const LONGEST_TEXT: usize = 32 * 1024;

/// The two halves of a session. Records from the socket are read into `records`.
pub fn pair(session: ClientConnection, records: Vec<u8>) -> (Encryptor, Decryptor) {
    let session = Arc::new(Mutex::new(session));
    let decryptor = Decryptor {
        session: Arc::clone(&session),
        records,
        start: 0,
        end: 0,
        failure: None,
    };
    let encryptor = Encryptor {
        session,
        records: Vec::new(),
    };
    (encryptor, decryptor)
}

/// Encrypts the bytes that a [`Sender`](crate::wire::net::socket::Sender) writes.
pub struct Encryptor {
    session: Arc<Mutex<ClientConnection>>,
    records: Vec<u8>,
}

impl Encryptor {
    /// Returns the records to write for `text`, which has at most [`LONGEST_TEXT`] bytes.
    pub fn encrypt(&mut self, text: &[u8]) -> io::Result<&[u8]> {
        let mut session = self.session.lock();
        session.writer().write_all(text)?;
        self.records.clear();
        while session.wants_write() {
            session.write_tls(&mut self.records)?;
        }
        Ok(&self.records)
    }
}

/// Decrypts the bytes that a [`Receiver`](crate::wire::net::socket::Receiver) reads.
pub struct Decryptor {
    session: Arc<Mutex<ClientConnection>>,
    /// The bytes `start..end` were read from the socket, and not passed to the session yet.
    records: Vec<u8>,
    start: usize,
    end: usize,
    failure: Option<rustls::Error>,
}

impl Decryptor {
    /// A reader that reads from `socket` and decrypts.
    pub fn reader<'a>(&'a mut self, socket: &'a Socket) -> impl Read + 'a {
        Reader {
            decryptor: self,
            socket,
        }
    }

    /// The error of the session, if it has failed.
    pub fn failure(&self) -> Option<&rustls::Error> {
        self.failure.as_ref()
    }

    /// Decrypts into `into` the records that were read, up to the first record with content. Returns `None` if no
    /// record has content.
    fn decrypt(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut session = self.session.lock();
        loop {
            match session.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read.map(Some),
            }
            if self.start == self.end {
                return Ok(None);
            }
            self.start += session.read_tls(&mut &self.records[self.start..self.end])?;
            if let Err(error) = session.process_new_packets() {
                self.failure = Some(error.clone());
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }
}

struct Reader<'a> {
    decryptor: &'a mut Decryptor,
    socket: &'a Socket,
}

impl Read for Reader<'_> {
    /// Reads from the socket at most once. Returns the error `Interrupted` if there is still no complete record with
    /// content: the caller then checks its deadline and calls again.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let decryptor = &mut *self.decryptor;
        if let Some(n) = decryptor.decrypt(into)? {
            return Ok(n);
        }
        let mut socket = self.socket;
        (decryptor.start, decryptor.end) = (0, socket.read(&mut decryptor.records)?);
        if decryptor.end == 0 {
            return Ok(0);
        }
        let decrypted = decryptor.decrypt(into)?;
        decrypted.ok_or_else(|| io::ErrorKind::Interrupted.into())
    }
}
