//! Puts scripts together: a line `-- part: <file>` stands for the text of that file.

/// The parts by their names. A part may include only later parts.
pub const PARTS: [(&str, &str); 26] = [
    ("release.lua", include_str!("release.lua")),
    ("acquire_share.lua", include_str!("acquire_share.lua")),
    ("join.lua", include_str!("join.lua")),
    ("release_share.lua", include_str!("release_share.lua")),
    ("usual_shares.lua", include_str!("usual_shares.lua")),
    ("renew_share.lua", include_str!("renew_share.lua")),
    ("roll_call.lua", include_str!("roll_call.lua")),
    ("quarantine.lua", include_str!("quarantine.lua")),
    ("fence.lua", include_str!("fence.lua")),
    ("shares.lua", include_str!("shares.lua")),
    ("stored.lua", include_str!("stored.lua")),
    ("foreign.lua", include_str!("foreign.lua")),
    ("token.lua", include_str!("token.lua")),
    ("bytes.lua", include_str!("bytes.lua")),
    ("count.lua", include_str!("count.lua")),
    ("serve.lua", include_str!("serve.lua")),
    ("near.lua", include_str!("near.lua")),
    ("hint.lua", include_str!("hint.lua")),
    ("channel.lua", include_str!("channel.lua")),
    ("listeners.lua", include_str!("listeners.lua")),
    ("publish.lua", include_str!("publish.lua")),
    ("primary.lua", include_str!("primary.lua")),
    ("redisson_taken.lua", include_str!("redisson_taken.lua")),
    ("redisson_primary.lua", include_str!("redisson_primary.lua")),
    ("redisson_holder.lua", include_str!("redisson_holder.lua")),
    ("redisson_field.lua", include_str!("redisson_field.lua")),
];

/// Replaces each line `-- part: <file>` of a script by that part.
pub fn whole(script: &str) -> String {
    PARTS
        .iter()
        .fold(script.to_owned(), |script, (name, part)| {
            script.replace(&format!("-- part: {name}"), part)
        })
}
