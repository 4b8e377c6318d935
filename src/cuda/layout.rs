//! Layout of the structs that kernels read: kernels/layout.cuh lists their fields for both sides.

const LIST: &[u8] = include_bytes!("../../kernels/layout.cuh");

/// Checks at compile time that a struct has the fields that kernels/layout.cuh lists under its name there.
macro_rules! same_layout {
    ($listed:ident, $type:ty { $($field:ident),+ $(,)? }) => {
        const _: () = {
            const fn bytes<T>(_: fn(&$type) -> &T) -> usize {
                size_of::<T>()
            }
            let fields = [$((stringify!($field), std::mem::offset_of!($type, $field), bytes(|it| &it.$field))),+];
            $crate::cuda::layout::check(stringify!($listed), size_of::<$type>(), &fields);
        };
    };
}
pub(crate) use same_layout;

/// Declares structs that kernels read. Each is checked against the fields that kernels/layout.cuh lists under the name
/// after the colon.
macro_rules! kernel_structs {
    ($(
        $(#[$meta:meta])*
        $vis:vis struct $type:ident: $listed:ident {
            $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $of:ty),+ $(,)?
        }
    )+) => {$(
        $(#[$meta])*
        #[repr(C)]
        $vis struct $type {
            $($(#[$field_meta])* $field_vis $field: $of),+
        }
        $crate::cuda::layout::same_layout!($listed, $type { $($field),+ });
    )+};
}
pub(crate) use kernel_structs;

/// Field of the list, and the position after it.
struct Field {
    name: &'static [u8],
    bytes: usize,
    end: usize,
}

const fn begins(text: &[u8], with: &[u8]) -> bool {
    let mut k = 0;
    while k < with.len() && k < text.len() && text[k] == with[k] {
        k += 1;
    }
    k == with.len()
}

// The compiler evaluates these searches for every struct. They compare one byte before they call `begins`, because the
// calls at all other positions would take 8 s of each build.

/// Returns the position of a struct's first field in the list.
const fn fields_of(name: &str) -> usize {
    let mut at = 0;
    while !(LIST[at] == b'L'
        && begins(from(at), b"LAYOUT_")
        && begins(from(at + 7), name.as_bytes())
        && LIST[at + 7 + name.len()] == b'(')
    {
        at += 1;
    }
    at + 7 + name.len() + b"(field)".len()
}

const fn from(at: usize) -> &'static [u8] {
    LIST.split_at(at).1
}

/// Returns the next field. None: the struct has no more; its last line ends without a backslash.
const fn next(mut at: usize) -> Option<Field> {
    while !(LIST[at] == b'f' && begins(from(at), b"field(")) {
        if LIST[at] == b'\n' && LIST[at - 1] != b'\\' {
            return None;
        }
        at += 1;
    }
    let name = at + b"field(".len();
    let mut end = name;
    while LIST[end] != b',' {
        end += 1;
    }
    let name = from(name).split_at(end - name).0;
    end += 2;
    let mut bytes = 0;
    while LIST[end] != b')' {
        bytes = bytes * 10 + (LIST[end] - b'0') as usize;
        end += 1;
    }
    Some(Field { name, bytes, end })
}

/// Panics, which fails the build, unless `fields`, each with name, offset and bytes, match the list.
pub const fn check(listed: &str, size: usize, fields: &[(&str, usize, usize)]) {
    let (mut at, mut offset, mut k) = (fields_of(listed), 0, 0);
    while k < fields.len() {
        let (name, place, bytes) = fields[k];
        assert!(place == offset, "a field lies elsewhere in kernels/layout.cuh");
        // An array here may be several fields with their own names in the list.
        while offset < place + bytes {
            let Some(field) = next(at) else { panic!("fewer fields in kernels/layout.cuh") };
            // `strides` of one side are named `stride` in the list.
            let same_name = begins(name.as_bytes(), field.name) && name.len() - field.name.len() <= 1;
            assert!(same_name || field.bytes < bytes, "a field has another name in kernels/layout.cuh");
            (at, offset) = (field.end, offset + field.bytes);
        }
        assert!(offset == place + bytes, "a field has another size in kernels/layout.cuh");
        k += 1;
    }
    assert!(next(at).is_none() && offset == size, "more fields in kernels/layout.cuh");
}

/// Returns the size in bytes of a struct that the host does not declare.
pub const fn bytes_of(listed: &str) -> usize {
    let (mut at, mut bytes) = (fields_of(listed), 0);
    while let Some(field) = next(at) {
        (at, bytes) = (field.end, bytes + field.bytes);
    }
    bytes
}

/// Returns the offset of a field in a struct that the host does not declare.
pub const fn offset_in(listed: &str, name: &str) -> usize {
    let (mut at, mut offset) = (fields_of(listed), 0);
    loop {
        let Some(field) = next(at) else { panic!("no such field in kernels/layout.cuh") };
        if begins(field.name, name.as_bytes()) && field.name.len() == name.len() {
            return offset;
        }
        (at, offset) = (field.end, offset + field.bytes);
    }
}
