//! Sockets, TLS, the parser of replies, and errors from error replies.

#[cfg(feature = "tls")]
pub mod cipher;
pub mod error_replies;
pub mod refusal;
pub mod replies;
pub mod socket;
#[cfg(feature = "tls")]
pub mod tls;
