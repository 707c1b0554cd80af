//! Locks across processes and machines for threaded services, kept in Redis.
