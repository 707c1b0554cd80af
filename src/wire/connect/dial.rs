//! Opens sockets to servers and sentinels, and begins TLS where the address has it.

use std::sync::{Arc, OnceLock};

#[cfg(feature = "tls")]
use redis::ConnectionAddr;

use crate::config::DEFAULT_PREFIX;
use crate::report::error::Error;
#[cfg(feature = "tls")]
use crate::report::error::ErrorKind;
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::wire::connect::errors::ConnectErrors;
#[cfg(feature = "tls")]
use crate::wire::connect::steps::Step;
use crate::wire::net::socket::{self, Closer, ConnectError, Receiver, Sender};
#[cfg(feature = "tls")]
use crate::wire::net::tls::Tls;

/// The settings of a client for all its sockets: to servers and to sentinels.
pub struct Dialer {
    /// Set if the address has TLS.
    #[cfg(feature = "tls")]
    tls: Option<Tls>,
    /// The prefix of the client's keys, for errors and for calls that need some key.
    prefix: Arc<str>,
    /// The client's id, a part of the names of its connections. Not set yet while `Builder::build` tries the address.
    holder: OnceLock<HolderId>,
}

impl Default for Dialer {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            prefix: DEFAULT_PREFIX.into(),
            holder: OnceLock::new(),
        }
    }
}

impl Dialer {
    /// Sets the prefix of the client's keys.
    pub fn set_prefix(&mut self, prefix: &str) {
        self.prefix = prefix.into();
    }

    /// The prefix of the client's keys.
    pub fn prefix(&self) -> &Arc<str> {
        &self.prefix
    }

    /// Sets the TLS of connections to addresses with TLS.
    #[cfg(feature = "tls")]
    pub fn set_tls(&mut self, tls: Tls) {
        self.tls = Some(tls);
    }

    /// Sets the id that names further connections.
    pub fn name_connections(&self, holder: &HolderId) {
        // A dialer belongs to one client, so the id is set once.
        let _ = self.holder.set(holder.clone());
    }

    /// The name of a connection, which `CLIENT LIST` shows: `purpose`, and the client's id if it is set. A holder id
    /// consists of printable characters without blanks, as Redis requires of names.
    pub fn connection_name(&self, purpose: &str) -> String {
        match self.holder.get() {
            Some(holder) => format!("{purpose}:{holder}"),
            None => purpose.to_owned(),
        }
    }

    /// Connects by `deadline`, with a TLS handshake if the address has TLS. (The resolver of host names has its own
    /// time-outs.) Before the handshake, calls `connected` with a handle by which another thread can close the socket.
    pub fn connect(
        &self,
        attempted: ConnectErrors<'_>,
        deadline: MonotonicTime,
        connected: impl FnOnce(Closer) -> Result<(), Error>,
    ) -> Result<(Sender, Receiver), Error> {
        let halves = open_socket(attempted, deadline);
        let halves = halves.map_err(|error| attempted.connect_error(error))?;
        connected(halves.0.closer())?;
        self.start_tls(attempted, halves, deadline)
    }

    /// Does the TLS handshake by `deadline`, if the address has TLS.
    #[cfg(feature = "tls")]
    pub fn start_tls(
        &self,
        attempted: ConnectErrors<'_>,
        (mut sender, mut receiver): (Sender, Receiver),
        deadline: MonotonicTime,
    ) -> Result<(Sender, Receiver), Error> {
        match (&self.tls, attempted.info.addr()) {
            (Some(tls), ConnectionAddr::TcpTls { host, .. }) => {
                attempted.enter(Step::TlsHandshake);
                let started = tls.start(host, &mut sender, &mut receiver, deadline);
                started
                    .map_err(|error| attempted.handshake_error(&tls.server_name(host), error))?;
            }
            (None, ConnectionAddr::TcpTls { .. }) => {
                let message = "TLS was not set up";
                return Err(Error::new(ErrorKind::InvalidConfig, message));
            }
            _ => {}
        }
        Ok((sender, receiver))
    }

    /// Without the feature `tls`, [`check_address`](crate::wire::connect::url::check_address) refuses addresses with
    /// TLS.
    #[cfg(not(feature = "tls"))]
    pub fn start_tls(
        &self,
        _: ConnectErrors<'_>,
        halves: (Sender, Receiver),
        _: MonotonicTime,
    ) -> Result<(Sender, Receiver), Error> {
        Ok(halves)
    }

    /// The error of TLS, if TLS has failed on the connection, perhaps only at a later read: a server may refuse the
    /// client's certificate after the handshake.
    pub fn tls_error(&self, attempted: ConnectErrors<'_>, receiver: &Receiver) -> Option<Error> {
        #[cfg(feature = "tls")]
        if let (Some(tls), Some(failure)) = (&self.tls, receiver.tls_failure())
            && let ConnectionAddr::TcpTls { host, .. } = attempted.info.addr()
        {
            return Some(attempted.tls_refused(&tls.server_name(host), failure));
        }
        let _ = (attempted, receiver);
        None
    }
}

/// Connects by `deadline`, without a TLS handshake.
pub fn open_socket(
    attempted: ConnectErrors<'_>,
    deadline: MonotonicTime,
) -> Result<(Sender, Receiver), ConnectError> {
    socket::connect(attempted.info.addr(), deadline, |step| {
        attempted.enter(step.into())
    })
}
