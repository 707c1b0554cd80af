//! One plain TCP connection for one request at a time.

use std::io::{self, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use crate::reply::{self, Reply};

pub(crate) struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Connects, and authenticates when there is a password. `limit` bounds every step.
    pub(crate) fn open(port: u16, password: Option<&str>, limit: Duration) -> io::Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let stream = TcpStream::connect_timeout(&address, limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        let mut connection = Connection(BufReader::new(stream));
        if let Some(password) = password
            && let Reply::Error(reason) = connection.command(&["AUTH", password])?
        {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        Ok(connection)
    }

    pub(crate) fn command(&mut self, args: &[&str]) -> io::Result<Reply> {
        let mut request = format!("*{}\r\n", args.len());
        for arg in args {
            request.push_str(&format!("${}\r\n{arg}\r\n", arg.len()));
        }
        self.0.get_mut().write_all(request.as_bytes())?;
        reply::read(&mut self.0)
    }

    /// Closes the connection, and waits until the server has closed it, too, so that `CLIENT LIST` no longer contains
    /// it. If the server was stopped, the wait ends with its time-out.
    pub(crate) fn close(mut self) {
        if self.0.get_ref().shutdown(Shutdown::Write).is_ok() {
            let _ = self.0.read(&mut [0]);
        }
    }
}
