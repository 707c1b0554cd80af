//! One connection to a server or a sentinel: its address, its socket, the login, the checks before the first use, and
//! the errors of these steps. [`crate::wire::endpoint`] decides which server to connect to.
//!
//! Pipelines, transactions and notifications read and write through `wire::net`, and not through the `Connection` of
//! redis-rs. Its time-outs hold for one `read()` and not for a whole reply, and its parser keeps all data that a server
//! sends. This crate uses the URLs, `Value`, commands, `Pipeline` and errors of redis-rs.
//!
//! - *Login.* It sends `HELLO` without arguments, which every user may call and which only asks. The reply tells a
//!   single server, a node of a Cluster and a Sentinel apart. The login ignores the refusal of a command that only
//!   informs.
//! - *Credentials.* The thread that connects calls the user's callback once the socket is connected. It holds no mutex
//!   during the call, and the time of the call is added to the deadline. If another connection breaks during the call,
//!   the new connection is not stale. If a reason to suspect connections appears during the call, the new connection is
//!   suspect.
//! - *Deadlines.* A deadline covers a request and all its replies, or all steps of making a connection. It is checked
//!   before each system call. When it has passed, one more read of 1 ms follows, for replies that arrived while a busy
//!   machine did not run the thread.
//! - *Idle connections.* A network may have forgotten a connection that was silent for `max_connection_idle`. The
//!   client replaces it before the next write, and does not probe it: a call waits for one new connection, instead of a
//!   probe and perhaps a time-out. Only a transaction has to use its connection again after a silence, that of the
//!   user's closure. If the silence was that long, a `PING` goes before the `EXEC`.
//! - *Old connections.* A connection is old after a random part of `max_connection_age`, at least three quarters of it.
//!   An old connection works, so it is used until the next connection is open. The leader of a pipeline waits for the
//!   next connection for a short time only. If the connection comes later, the connector keeps it for a later caller.
//! - *Stale, suspect and outdated connections*: see [`epoch`].

pub mod connection;
pub mod data_check;
pub mod dial;
pub mod epoch;
pub mod errors;
pub mod handshake;
pub mod steps;
pub mod url;
