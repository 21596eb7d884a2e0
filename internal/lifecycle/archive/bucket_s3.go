//go:build s3

package archive

import _ "gocloud.dev/blob/s3blob" // s3://; every outflow run would have it in memory
