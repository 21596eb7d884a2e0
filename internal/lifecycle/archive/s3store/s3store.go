// Package s3store is what the archive asks of a bucket of S3 beyond gocloud.dev/blob. It is apart from the
// archive because a program that imports it has the client of AWS in memory.
package s3store

import (
	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/feature/s3/transfermanager"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"gocloud.dev/blob"
	_ "gocloud.dev/blob/s3blob" // s3://
)

// singlePut is the largest object that S3 takes in one request.
const singlePut = 5 << 30

// Whole lets an object be written by one request, whatever its size. In several parts it would be created by
// another kind of request, and not every server that honours If-None-Match does so for that as well. It is a
// BeforeWrite of a bucket's writers.
func Whole(b *blob.Bucket, as func(any) bool) error {
	var client *s3.Client
	var upload *transfermanager.Client
	if !b.As(&client) || !as(&upload) {
		return nil // no bucket of S3
	}
	*upload = *transfermanager.New(client, func(o *transfermanager.Options) {
		o.MultipartUploadThreshold = singlePut
		o.RequestChecksumCalculation = client.Options().RequestChecksumCalculation
	})
	return nil
}

// After lets a list begin behind a name, within its folder. It is a BeforeList.
func After(name string, as func(any) bool) error {
	var list *s3.ListObjectsV2Input
	if as(&list) {
		list.StartAfter = aws.String(aws.ToString(list.Prefix) + name)
	}
	return nil
}
