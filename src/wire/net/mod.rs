//! Sockets, TLS, and the parser of replies.

pub mod replies;
pub mod socket;
#[cfg(feature = "tls")]
pub mod tls;
