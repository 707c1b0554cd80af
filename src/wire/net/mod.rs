//! Sockets, TLS, and the parser of replies.

#[cfg(feature = "tls")]
pub mod cipher;
pub mod replies;
pub mod socket;
#[cfg(feature = "tls")]
pub mod tls;
